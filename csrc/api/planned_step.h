// The step of a libtorch optimizer: its plan, kept from step to step, and its control block.
#pragma once

#include <torchopt_ext/optim.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/control.h"
#include "plan/step_plan.h"
#include "plan/tensor_checks.h"

namespace torchopt_ext {

class PlannedStep {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using State = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  // `names`: of parameters that have one, for messages.
  explicit PlannedStep(std::unordered_map<const void*, std::string> names = {})
      : names_(std::move(names)) {}

  // Gives parameters with a first gradient their state.
  void step(const Groups& groups, State& state, double max_grad_norm, bool skip_nonfinite);

  // Makes what there is of state fit its parameters: on their device, in their storage order.
  // Raises, naming the parameter, if a tensor has another shape.
  void fit(const Groups& groups, State& state) const;

  // A copy of a field of the control block, float64; NaN if there was no step yet.
  at::Tensor control(double Control::*field) const;
  bool norm_was_measured() const { return norm_was_measured_; }

 private:
  // A parameter's place in the groups.
  struct Slot {
    size_t group;
    size_t index;
  };

  bool collect(const Groups& groups, const State& state);
  void build(const Groups& groups, State& state);
  void set_control(double max_grad_norm, bool skip_nonfinite);
  Label what(size_t number, const at::Tensor& param) const;

  std::unordered_map<const void*, std::string> names_;
  std::unique_ptr<StepPlan> plan_;
  std::vector<Slot> slots_;          // of the plan's entries
  std::vector<Slot> idle_;           // of parameters without state
  std::vector<size_t> group_sizes_;  // that the plan was built for
  std::vector<uint8_t> remaining_;   // entries whose gradient needs a closer look
  at::Tensor control_;
  at::Tensor accumulator_;
  std::pair<double, bool> settings_;  // that the control block has
  bool norm_was_measured_ = false;
};

// A group's options. Raises if they are those of another optimizer.
const FusedAdamWOptions& options_of(const torch::optim::OptimizerParamGroup& group);

// One group's hyperparameters; raises naming the argument that is out of range.
AdamHyper hyper_of(const FusedAdamWOptions& options);

}  // namespace torchopt_ext

// The step of a libtorch optimizer: its plan, kept between steps, and its control block.
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

  // `names`: names of parameters by TensorImpl, where there are any, for error messages.
  explicit PlannedStep(std::unordered_map<const void*, std::string> names = {})
      : names_(std::move(names)) {}

  // Makes a step, and before it the state of parameters with a first gradient. If it raises, it
  // leaves no new state.
  void step(const Groups& groups, State& state, double max_grad_norm, bool skip_nonfinite);

  // Moves the state of parameters that require a gradient to their device and storage order.
  // Raises, naming the parameter, if a tensor is missing or has another shape or dtype.
  void fit_state(const Groups& groups, State& state) const;

  // Returns a copy of a field of the control block as float64; 0 before the first step.
  at::Tensor control(double Control::*field) const;
  bool norm_was_measured() const { return norm_was_measured_; }

 private:
  // A parameter's place in the groups.
  struct Slot {
    size_t group;
    size_t index;
  };

  bool collect(const Groups& groups, const State& state);
  void build(const Groups& groups, State& state, std::vector<at::Tensor>& begun);
  void fit(FusedAdamWParamState& param_state, bool amsgrad, size_t number,
           const at::Tensor& param) const;
  void set_control(double max_grad_norm, bool skip_nonfinite);
  Label what(size_t number, const at::Tensor& param) const;

  std::unordered_map<const void*, std::string> names_;
  std::unique_ptr<StepPlan> plan_;
  std::vector<Slot> slots_;          // by plan entry
  std::vector<bool> planned_;        // by parameter: whether it has a plan entry
  std::vector<size_t> group_sizes_;  // when the plan was built
  at::Tensor control_;
  at::Tensor accumulator_;
  std::pair<double, bool> settings_;  // the control block's
  bool norm_was_measured_ = false;
};

// Calls visit(k, moment) for a state's moments by their numbers in Adam::kStates.
template <class State, class Visit>
void for_each_moment(State& param_state, bool with_max, const Visit& visit) {
  visit(Adam::kExpAvg, param_state.exp_avg());
  visit(Adam::kExpAvgSq, param_state.exp_avg_sq());
  if (with_max) {
    visit(Adam::kMaxExpAvgSq, param_state.max_exp_avg_sq());
  }
}

// Returns a group's options. Raises if the options belong to another optimizer class.
const FusedAdamWOptions& options_of(const torch::optim::OptimizerParamGroup& group);

// Returns a group's hyperparameters. Raises, naming the argument, if one is out of range.
Hyper hyper_of(const FusedAdamWOptions& options);

}  // namespace torchopt_ext

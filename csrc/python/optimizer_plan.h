// The plan of one optimizer: its step plans (one for each device and norm group) and the snapshot
// of the Python objects they were built from. One call makes a whole step.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "plan/step_plan.h"
#include "python/state_snapshot.h"

namespace torchopt_ext {

class OptimizerPlan {
 public:
  // A parameter with its state, as local tensors.
  struct Param {
    pybind11::object param;  // what the optimizer holds; a DTensor or the local tensor itself
    at::Tensor local;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    std::optional<at::Tensor> max_exp_avg_sq;
    at::Tensor step;
    int32_t group;
    std::string name;
    size_t part;  // parts share a device and the ranks that sum their norm
  };

  // `idle`: parameters without state. `local_gradient(param)`: the local gradient of a DTensor
  // parameter, or None. Raises what StepPlan raises.
  OptimizerPlan(const pybind11::list& param_groups, const pybind11::dict& state,
                std::vector<Param> params, const std::vector<at::Device>& part_devices,
                std::vector<at::Tensor> idle, bool decoupled_weight_decay,
                pybind11::object local_gradient);

  // Takes this step's gradients. False, with nothing changed, if the plan no longer fits: objects
  // or memory were replaced, or a parameter without state has a gradient.
  bool collect(const pybind11::list& param_groups, const pybind11::dict& state);

  // Pass A of one part, after collect().
  void accumulate(size_t part, const at::Tensor& accumulator) const;

  // Pass B of every part, with its device's control block; then lets go of the gradients.
  void update(const pybind11::list& param_groups, const std::vector<at::Tensor>& part_controls);

  // All of a step for one part whose norm is its own: collect, pass A if `with_norm`, control,
  // pass B. Overwrites the accumulator.
  bool step(const pybind11::list& param_groups, const pybind11::dict& state,
            const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
            const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf);

  size_t parts() const { return plans_.size(); }
  std::vector<at::Device> part_devices() const;
  int64_t gradients_copied() const;

 private:
  struct Wrapped {
    pybind11::object param;
    pybind11::object local;  // param._local_tensor when the plan was built
    size_t part;
    size_t index;
  };

  StateSnapshot snapshot_;
  std::vector<StepPlan> plans_;
  std::vector<Wrapped> wrapped_;
  std::vector<at::Tensor> idle_;
  bool decoupled_weight_decay_;
  pybind11::object local_gradient_;
};

}  // namespace torchopt_ext

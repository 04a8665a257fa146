// The plan of one optimizer: its step plans (one for each device and norm group) and the snapshot
// of the Python objects they were built from. One call makes a whole step.
//
// Of the optimizer it holds no tensor and no Python object, only addresses, which the snapshot's
// objects() keep valid: so tensors can be swapped, and reference cycles through an optimizer are
// the garbage collector's business as with torch's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "plan/step_plan.h"
#include "python/local_path.h"
#include "python/state_snapshot.h"

namespace torchopt_ext {

class OptimizerPlan {
 public:
  using LocalObjects = std::array<pybind11::object, kKept>;

  // A parameter with its state, as Python objects: what the optimizer holds (a DTensor, a wrapper
  // subclass, or the local tensor itself) and the local tensors in the order of Array (kernels/tensor_work.h),
  // None where absent.
  struct Param {
    pybind11::object param;
    LocalObjects local;
    int32_t group;
    std::string name;
    size_t part;  // parts share a device and the ranks that sum their norm
    StepPlan::Place place;
  };

  // `idle`: parameters without state. `local_gradients(params)`: the local gradients of DTensor
  // parameters whose gradient is placed otherwise or not yet complete. Raises what StepPlan raises.
  OptimizerPlan(const pybind11::list& param_groups, const pybind11::dict& state,
                const std::vector<Param>& params, const std::vector<at::Device>& part_devices,
                const pybind11::list& idle, pybind11::object local_gradients,
                const StepOptions& options);

  // What has to be kept alive as long as the plan is used.
  pybind11::list objects() const;

  // Takes this step's tensors, gradients and hyperparameters; every check of a step is made here,
  // so that of several optimizers none is updated when one cannot be. False, with nothing changed,
  // if the plan no longer fits: objects were replaced, or a parameter without state has a gradient.
  bool collect(const pybind11::list& param_groups, const pybind11::dict& state);

  // Pass A of one part, after collect(). `normalize`: see cuda/passes.h.
  void accumulate(size_t part, const at::Tensor& accumulator, bool normalize);

  // Pass B of every part, with its device's control block; then lets go of the gradients.
  void update(const std::vector<at::Tensor>& part_controls);

  // Lets go of what collect() took.
  void release();

  // All of a step for one part whose norm is its own: collect, pass A if `with_norm`, control,
  // pass B. Overwrites the accumulator.
  bool step(const pybind11::list& param_groups, const pybind11::dict& state,
            const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
            const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf);

  std::vector<at::Device> part_devices() const;
  int64_t gradients_copied() const;
  // Of each part, norms and counts (work/passes.h), and which parameters its rows are.
  std::vector<std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>>> traces() const;

 private:
  // Addresses of one entry's Python objects.
  struct Objects {
    PyObject* param;
    std::array<PyObject*, kKept> local;
    uint32_t path;  // from param to its local tensor, in paths_; 0: param is that tensor
    int64_t position;
  };

  enum class Left : uint8_t { kNothing, kGradient, kAll };

  uint32_t path_of(pybind11::handle param, pybind11::handle local);
  void check_idle() const;
  void check_collected() const;
  void look(size_t part);
  bool attach(size_t part);
  void set_gradients(size_t part);

  bool running_ = false;
  bool collected_ = false;
  StateSnapshot snapshot_;
  std::vector<StepPlan> plans_;
  std::vector<LocalPath> paths_{LocalPath{}};
  std::vector<std::vector<Objects>> objects_;    // of each plan's entries
  std::vector<std::vector<GroupHyper>> hypers_;  // of each plan, this step's
  std::vector<std::vector<bool>> uses_group_;    // of each plan, by group
  std::vector<PyObject*> idle_;
  std::vector<Left> what_is_left_;  // of the part in work
  std::vector<size_t> changed_;
  pybind11::object local_gradients_;  // a function of a module
};

}  // namespace torchopt_ext

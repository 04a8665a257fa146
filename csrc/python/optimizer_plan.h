// The plan of one optimizer: its step plans (one for each device and norm group) and the snapshot
// of the Python objects they were built from. One call makes a whole step.
//
// It owns the Python objects that it reads, and shows them to the garbage collector, which so finds
// cycles through an optimizer. Of the tensors behind them it owns none: torch.utils.swap_tensors
// and nn.Module.to reject a tensor that C++ refers to a second time.
//
// One thread uses it from collect() to release(), also while others run Python: _begin_use() of
// optim/step.py sees to it.
#pragma once

#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
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
  // subclass, or the local tensor itself) and the local tensors in the order of Array
  // (kernels/tensor_work.h), None where absent. Then its group, its name, its part (parts share a
  // device and the ranks that sum their norm), its StepPlan::Place, and StepPlan::Entry::copied.
  using Param = std::tuple<pybind11::object, LocalObjects, int32_t, std::string, size_t,
                           std::tuple<uint32_t, int64_t, int64_t, int64_t>, bool>;

  // `idle`: parameters without state. `local_gradients(params)`: the local gradients of DTensor
  // parameters whose gradient is placed otherwise or not yet complete. Raises what StepPlan raises.
  OptimizerPlan(const pybind11::list& param_groups, const pybind11::dict& state,
                const std::vector<Param>& params, const std::vector<at::Device>& part_devices,
                const pybind11::list& idle, pybind11::object local_gradients,
                const StepOptions& options);

  // The garbage collector's tp_traverse and tp_clear. A cleared plan fits no optimizer.
  int traverse(visitproc visit, void* arg) const;
  void clear();

  // Takes this step's tensors, gradients and hyperparameters; every check of a step is made here,
  // so that of several optimizers none is updated when one cannot be. False, with nothing changed,
  // if the plan no longer fits: objects were replaced, or a parameter without state has a gradient.
  bool collect(const pybind11::list& param_groups, const pybind11::dict& state);

  // Pass A of one part, after collect(), over all gradients but those of the parameters at the
  // positions `measured`, of any part.
  void accumulate(size_t part, const at::Tensor& accumulator, const std::vector<size_t>& measured);

  // Pass B of every part, with its device's control block; then releases the gradients.
  void update(const std::vector<at::Tensor>& part_controls);

  // Drops the gradients and the learning rates that collect() took.
  void release();

  // All of a step for one part whose norm is its own: collect, pass A if `with_norm`, control,
  // pass B. Overwrites the accumulator. `measured`: as accumulate()'s; `squares`: accumulators with
  // their sums.
  bool step(const pybind11::list& param_groups, const pybind11::dict& state,
            const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
            const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
            const std::vector<size_t>& measured, const std::vector<at::Tensor>& squares);

  int64_t gradients_copied() const;
  // Of each part, norms and counts (work/passes.h), and which parameters its rows are.
  std::vector<std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>>> traces() const;

 private:
  // One entry's Python objects.
  struct Objects {
    pybind11::object param;
    LocalObjects local;
    uint32_t path;  // from param to its local tensor, in paths_; 0: param is that tensor
    Array own;      // which of `local` that is: kParam, or kMaster beside a copy
  };

  // What collect() still has to do for an entry.
  enum class Remaining : uint8_t { kNothing, kGradient, kAll };

  // Calls release() when a step ends, however it ends: a gradient must not outlive it.
  auto release_at_end() {
    return c10::make_scope_exit([this] { release(); });
  }
  uint32_t path_of(pybind11::handle param, pybind11::handle local);
  std::vector<size_t> entries_of(size_t part, const std::vector<size_t>& positions) const;
  void collect_unchanged(size_t part);
  bool attach_changed(size_t part);
  void set_remaining_gradients(size_t part);

  bool collected_ = false;
  StateSnapshot snapshot_;
  std::vector<StepPlan> plans_;
  std::vector<LocalPath> paths_{LocalPath{}};
  std::vector<std::vector<Objects>> objects_;        // of each plan's entries
  std::vector<std::vector<GroupHyper>> hypers_;      // of each plan, this step's
  std::vector<std::vector<bool>> uses_group_;        // of each plan, by group
  std::vector<std::pair<size_t, size_t>> entry_of_;  // of each position: plan and entry
  std::vector<pybind11::object> idle_;
  std::vector<Remaining> remaining_;  // of the part in work
  pybind11::object local_gradients_;
};

}  // namespace torchopt_ext

// The plan of one optimizer: its step plans (one for each device and norm group) and the snapshot
// of the Python objects they were built from. One call makes a whole step.
//
// Between steps the plan owns none of the objects that it reads, so that what a user or framework
// drops is freed at once, and it reads none before the snapshot has found it in the groups or the
// state again. From collect() to release() it owns them, because other code may drop them: other
// threads, finalizers and what a step calls. A short step on the CPU keeps the GIL instead and owns
// them only from where it calls other code on: counting references would take a tenth of a step
// over many small tensors. The plan never owns the tensors behind the objects:
// torch.utils.swap_tensors and nn.Module.to reject a tensor with a second reference, also a weak
// one, from C++.
//
// One thread uses a plan from collect() to release(), also while other threads run Python:
// _begin_use() of optim/step.py ensures this.
#pragma once

#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/step_plan.h"
#include "plan/weight_mark.h"
#include "python/local_path.h"
#include "python/state_snapshot.h"

namespace torchopt_ext {

class OptimizerPlan {
 public:
  using Objects = std::array<pybind11::object, kPersistentArrays>;

  // A parameter with its state as Python objects in the order of Array (kernels/tensor_work.h),
  // None where absent: the objects in groups and state (DTensors, wrapper subclasses, or the local
  // tensors themselves), and their local tensors. Then its group, its name and its number for
  // messages, its part (parameters of a part share a device and the ranks that sum their norm),
  // StepPlan::Place, Entry::copied, and, if it is orthogonalized, the fields of its matrices and
  // the number of its exchange.
  using Param =
      std::tuple<Objects, Objects, int32_t, std::string, size_t, size_t,
                 std::tuple<uint32_t, int64_t, int64_t, int64_t, int64_t, int64_t>, bool,
                 std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, double>>, int64_t>;
  // A group's algorithm and, if it writes directions, the coefficients of Newton-Schulz iterations,
  // eps, the dtype of the products, and NewtonSchulz::instead.
  using GroupAlgorithm =
      std::tuple<Algorithm, std::vector<std::array<double, 3>>, double,
                 std::optional<at::ScalarType>, std::function<at::Tensor(const at::Tensor&)>>;

  // `algorithms`: by group. `idle`: parameters without state. `local_gradients(params)` returns the
  // local gradients of parameters whose gradient C++ does not unwrap: DTensors placed otherwise or
  // incomplete, and other wrapper subclasses. `exchange(part, average, apply)` is Exchange.
  // `staging_bytes`: of a slot in which states on the host are staged; 0: they are used there.
  // Raises what StepPlan raises.
  OptimizerPlan(const pybind11::list& param_groups, const pybind11::dict& state,
                const std::vector<Param>& params, const std::vector<GroupAlgorithm>& algorithms,
                const std::vector<at::Device>& part_devices, const pybind11::list& idle,
                pybind11::object local_gradients, pybind11::object exchange,
                const StepOptions& options, int64_t staging_bytes);

  OptimizerPlan(const OptimizerPlan&) = delete;
  OptimizerPlan& operator=(const OptimizerPlan&) = delete;
  ~OptimizerPlan() { release(); }

  // Takes this step's tensors, gradients and hyperparameters. Makes every check of a step, so that
  // no optimizer of several is updated if one is rejected. Returns false, with nothing changed, if
  // the plan does not fit: objects were replaced, or a parameter without state has a gradient
  // or is no longer frozen.
  // `owns`: whether other code may run until release().
  bool collect(const pybind11::list& param_groups, const pybind11::dict& state, bool owns = true);

  // Runs pass A of one part, after collect().
  void accumulate(size_t part, const at::Tensor& accumulator);

  // Runs pass B of every part with the control block of its device, then releases the gradients.
  void update(const std::vector<at::Tensor>& part_controls);
  // Runs pass B of one part, on the current stream. After the last part the caller releases.
  void update_part(size_t part, const at::Tensor& control);

  // What a part has collected for the parameters with a gradient: their positions, local tensors,
  // fp32 masters (None without one) and gradients.
  struct Collected {
    std::vector<int64_t> positions;
    pybind11::list params;
    pybind11::list masters;
    std::vector<at::Tensor> gradients;
  };
  std::vector<Collected> collected() const;

  // Takes weights as they are for those of the last step, whose masters they were rounded from.
  void renew_marks();

  // Drops the gradients and the learning rates that collect() took.
  void release();

  // Makes a whole step of one part whose norm is not shared: collect(), pass A if `with_norm`,
  // control update, pass B. Returns what collect() returns. Overwrites the accumulator.
  bool step(const pybind11::list& param_groups, const pybind11::dict& state,
            const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
            const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf);

  // Returns, by the parameter's id, the marks of weights with an fp32 master at the last step.
  pybind11::dict weight_marks() const;

  int64_t gradients_copied() const;
  // Returns each part's norms and counts (work/passes.h) and the parameter position of each row.
  std::vector<std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>>> traces() const;

 private:
  // A parameter in the groups. Another parameter may get its address, but not its version counter.
  struct ParamIdentity {
    explicit ParamIdentity(pybind11::handle param);
    bool is_same() const;
    WeightMark mark(const at::Tensor& shard) const;  // of the parameter as it is

    PyObject* object;
    c10::VariableVersion counter;
  };

  // One entry's Python objects. Those that path leads to are null between steps.
  struct EntryObjects {
    ParamIdentity param;
    std::array<PyObject*, kPersistentArrays> local;  // null where absent
    LocalPath path;                                  // from param to its local tensor
    Array stepped;  // index in `local` of that tensor: kParam, or kMaster with a copy
  };

  // A local tensor that an object in groups or state leads to.
  struct Followed {
    size_t entry;
    size_t array;
    PyObject* object;
    const PyObject* local;  // the local tensor when the plan was built
    LocalPath path;
  };

  struct Part {
    StepPlan plan;
    std::vector<EntryObjects> objects;  // by entry
    std::vector<Followed> followed;
    std::vector<int64_t> positions;  // by entry: its parameter's
    std::vector<bool> uses_group;    // by group
    std::vector<GroupHyper> hypers;  // by group, this step's
    std::vector<WeightMark> marks;   // by entry, only of weights with an fp32 master
    std::vector<uint8_t> written;    // by entry: whether the weight does not fit its mark
  };

  // A parameter without state. On another rank it may have state, and a gradient once it is
  // unfrozen, so that a plan of the same parts must be built on all ranks then.
  struct Idle {
    ParamIdentity param;
    bool frozen;
  };

  // Calls release() when a step ends, even by an exception: a gradient must not outlive the step.
  auto release_at_end() {
    return c10::make_scope_exit([this] { release(); });
  }
  void own_objects();
  void disown_objects();
  static bool follow(Part& part);
  static void collect_unchanged(Part& part);
  void take_written_weights(Part& part);
  void run_pass_b(size_t number, const at::Tensor& control);
  static void renew_marks(Part& part);
  bool attach_changed(Part& part);
  void set_pending_gradients(Part& part);

  bool collected_ = false;
  bool owns_ = false;
  StateSnapshot snapshot_;
  std::vector<Algorithm> algorithms_;  // by group
  std::vector<Part> parts_;
  std::vector<Idle> idle_;
  pybind11::object local_gradients_;
  pybind11::object exchange_;
};

}  // namespace torchopt_ext

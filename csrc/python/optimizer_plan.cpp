#include "python/optimizer_plan.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "ops/operators.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// By algorithm: its hyperparameters' keys in a param group, interned and never freed.
const std::vector<std::vector<PyObject*>> kKeys = [] {
  std::vector<std::vector<PyObject*>> all;
  for_each_algorithm([&](auto a) {
    std::vector<PyObject*>& keys = all.emplace_back();
    for (const HyperSpec& spec : decltype(a)::kHypers) {
      keys.push_back(PyUnicode_InternFromString(spec.key != nullptr ? spec.key : spec.name));
    }
  });
  return all;
}();

// Raises TypeError with the value as Python prints it and what was expected.
[[noreturn]] void raise_mismatch(const std::string& name, py::handle value, const char* expected) {
  throw py::type_error(name + " is " + py::repr(value).cast<std::string>().substr(0, 200) +
                       ", expected " + expected);
}

// Called before a value's own Python code.
using BeforePython = c10::function_ref<void()>;

// Converts a hyperparameter as Python's float() or bool(), but raises for a string, as "no" would
// be true.
double number(const HyperSpec& spec, py::handle value, BeforePython before) {
  PyObject* const object = value.ptr();
  if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object) && !PyBool_Check(object)) {
    before();
  }
  if (spec.range == Range::kFlag && PyUnicode_Check(object) == 0) {
    return static_cast<double>(py::bool_(py::reinterpret_borrow<py::object>(value)));
  }
  try {
    return value.cast<double>();
  } catch (const py::cast_error&) {
    raise_mismatch(
        spec.index < 0 ? spec.name : std::string(spec.key) + "[" + std::to_string(spec.index) + "]",
        value, spec.range == Range::kFlag ? "a bool" : "a number");
  }
}

// Reads a param group's hyperparameters. Raises if one is missing, of another type or out of range,
// or if `device` cannot read the learning rate.
GroupHyper read_group(py::handle group, Algorithm algorithm, at::Device device,
                      BeforePython before) {
  GroupHyper read{.algorithm = algorithm, .hyper = {}, .lr = {}};
  const auto hypers = declaration_of(algorithm).hypers;
  const std::vector<PyObject*>& keys = kKeys[static_cast<size_t>(algorithm)];
  for (size_t i = 0; i < hypers.size(); ++i) {
    const HyperSpec& spec = hypers[i];
    PyObject* const item = PyDict_GetItem(group.ptr(), keys[i]);
    if (!spec.in_operator || (item == nullptr && spec.may_lack)) {
      read.hyper.value[i] = spec.in_operator ? spec.usual : 0.0;
      continue;
    }
    if (item == nullptr) {
      throw py::key_error(PyUnicode_AsUTF8(keys[i]));
    }
    auto value = py::reinterpret_borrow<py::object>(item);
    if (i == kLr && THPVariable_Check(item)) {
      before();
      read.lr = THPVariable_Unpack(item);
      if (c10::isReducedFloatingType(read.lr.scalar_type()) ||
          c10::isIntegralType(read.lr.scalar_type(), /*includeBool=*/false)) {
        read.lr = read.lr.to(at::kFloat);
      }
      check_lr(read.lr, device);
      continue;
    }
    if (i == kPeakLr && PyBool_Check(item) != 0) {
      raise_mismatch(spec.name, value, "a learning rate");
    }
    if (spec.index >= 0) {
      if (!PyTuple_CheckExact(item) && !PyList_CheckExact(item)) {
        before();
      }
      if (PySequence_Check(item) == 0 || py::len(value) != 2) {
        raise_mismatch(spec.key, value, "two numbers");
      }
      value = value[py::int_(spec.index)];
    }
    read.hyper.value[i] = number(spec, value, before);
  }
  check_hyper(algorithm, read.hyper);
  return read;
}

}  // namespace

OptimizerPlan::OptimizerPlan(const py::list& param_groups, const py::dict& state,
                             const std::vector<Param>& params,
                             const std::vector<GroupAlgorithm>& algorithms,
                             const std::vector<at::Device>& part_devices, const py::list& idle,
                             py::object local_gradients, py::object exchange,
                             const StepOptions& options, int64_t staging_bytes)
    : snapshot_(param_groups, state),
      local_gradients_(std::move(local_gradients)),
      exchange_(std::move(exchange)) {
  std::vector<std::shared_ptr<const NewtonSchulz>> newton_schulz;
  for (const auto& [algorithm, coefficients, eps, dtype, instead] : algorithms) {
    algorithms_.push_back(algorithm);
    newton_schulz.push_back(std::make_shared<NewtonSchulz>(coefficients, eps, instead));
  }
  std::vector<std::vector<StepPlan::Entry>> entries(part_devices.size());
  std::vector<std::vector<EntryObjects>> objects(part_devices.size());
  std::vector<std::vector<Followed>> followed(part_devices.size());
  std::vector<std::vector<int64_t>> positions(part_devices.size());
  std::vector<const PyObject*> used;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& [held, local, group, name, number, part, place, copied, matrices,
                 number_of_exchange] = params[i];
    const auto& [index, first_element, run, stride, rows, gap] = place;
    StepPlan::Entry entry;
    entry.group = group;
    entry.algorithm = algorithms_.at(static_cast<size_t>(group));
    entry.orthogonalization = {newton_schulz[static_cast<size_t>(group)],
                               std::get<3>(algorithms[static_cast<size_t>(group)]),
                               {},
                               number_of_exchange};
    for (const auto& [first, rows, cols, stride, lr_scale] : matrices) {
      entry.orthogonalization.matrices.push_back({first, rows, cols, stride, lr_scale});
    }
    entry.name = name;
    entry.position = number;
    entry.place = {index, first_element, run, stride, rows, gap};
    entry.copied = copied;
    const Array stepped = copied ? kMaster : kParam;
    EntryObjects its{
        ParamIdentity(held[kParam]), {}, local_path(held[stepped], local[stepped]), stepped};
    for (size_t k = 0; k < local.size(); ++k) {
      if (local[k].is_none()) {
        continue;
      }
      used.push_back(held[k].ptr());
      entry.tensors[k] = THPVariable_Unpack(local[k].ptr());
      if (const LocalPath path = local_path(held[k], local[k]); path.empty()) {
        its.local[k] = local[k].ptr();
      } else {
        followed.at(part).push_back({entries[part].size(), k, held[k].ptr(), local[k].ptr(), path});
      }
    }
    objects.at(part).push_back(std::move(its));
    positions[part].push_back(static_cast<int64_t>(i));
    entries[part].push_back(std::move(entry));
  }
  for (const py::handle param : idle) {
    used.push_back(param.ptr());
    idle_.push_back({ParamIdentity(param), !THPVariable_Unpack(param.ptr()).requires_grad()});
  }
  snapshot_.expect(used);
  std::map<c10::DeviceIndex, std::shared_ptr<StagingRing>> rings;
  for (size_t i = 0; i < entries.size(); ++i) {
    std::vector<bool> uses_group(param_groups.size());
    for (const StepPlan::Entry& entry : entries[i]) {
      uses_group.at(static_cast<size_t>(entry.group)) = true;
    }
    const bool follows = std::ranges::any_of(entries[i], [](const StepPlan::Entry& entry) {
      const at::Tensor& master = entry.tensors[kMaster];
      return !entry.copied && master.defined() && master.scalar_type() == at::kFloat;
    });
    std::shared_ptr<StagingRing>& ring = rings[part_devices[i].index()];
    if (ring == nullptr && staging_bytes > 0) {
      ring = std::make_shared<StagingRing>(staging_bytes);
    }
    Part part{.plan = StepPlan(entries[i], part_devices[i], options, {}, ring),
              .objects = std::move(objects[i]),
              .followed = std::move(followed[i]),
              .positions = std::move(positions[i]),
              .uses_group = std::move(uses_group),
              .hypers = {},
              .marks = {},
              .written = {}};
    if (follows) {
      for (size_t k = 0; k < entries[i].size(); ++k) {
        part.marks.push_back(part.objects[k].param.mark(entries[i][k].tensors[kParam]));
      }
      part.written.resize(part.marks.size());
    }
    parts_.push_back(std::move(part));
  }
}

bool OptimizerPlan::collect(const py::list& param_groups, const py::dict& state, bool owns) {
  release();
  if (!snapshot_.matches(param_groups, state)) {
    return false;
  }
  for (const Idle& idle : idle_) {
    if (!idle.param.is_same()) {
      return false;
    }
    const at::Tensor& param = THPVariable_Unpack(idle.param.object);
    if (param.grad().defined() || (param.requires_grad() && idle.frozen)) {
      return false;
    }
  }
  collected_ = true;
  if (owns) {
    own_objects();
  }
  auto releasing = release_at_end();
  for (Part& part : parts_) {
    if (!follow(part)) {
      return false;
    }
    collect_unchanged(part);
    if (!attach_changed(part)) {
      return false;
    }
    set_pending_gradients(part);
    part.plan.check_gradient_overlap();
    part.plan.renew_copies();
    part.plan.prepare();
    for (size_t group = 0; group < part.uses_group.size(); ++group) {
      part.hypers.push_back(part.uses_group[group]
                                ? read_group(param_groups[group], algorithms_[group],
                                             part.plan.device(), [this] { own_objects(); })
                                : GroupHyper{});
    }
  }
  for (Part& part : parts_) {
    take_written_weights(part);
  }
  releasing.release();  // the guard then does nothing
  return true;
}

void OptimizerPlan::accumulate(size_t part, const at::Tensor& accumulator) {
  TORCH_CHECK(collected_, "gradients have not been collected");
  StepPlan& plan = parts_.at(part).plan;
  check_accumulator(accumulator, plan.device());
  const py::gil_scoped_release unlocked;
  plan.accumulate(accumulator, /*normalize=*/true);
}

void OptimizerPlan::update(const std::vector<at::Tensor>& part_controls) {
  TORCH_CHECK(collected_, "gradients have not been collected");
  const auto releasing = release_at_end();
  TORCH_CHECK(part_controls.size() == parts_.size(), "got ", part_controls.size(),
              " control blocks for ", parts_.size(), " parts");
  for (size_t i = 0; i < parts_.size(); ++i) {
    check_control(part_controls[i], parts_[i].plan.device());
  }
  const py::gil_scoped_release unlocked;
  for (size_t i = 0; i < parts_.size(); ++i) {
    run_pass_b(i, part_controls[i]);
  }
}

void OptimizerPlan::update_part(size_t part, const at::Tensor& control) {
  TORCH_CHECK(collected_, "gradients have not been collected");
  check_control(control, parts_.at(part).plan.device());
  const py::gil_scoped_release unlocked;
  run_pass_b(part, control);
}

void OptimizerPlan::run_pass_b(size_t number, const at::Tensor& control) {
  Part& part = parts_[number];
  part.plan.update(part.hypers, control, [&](const ExchangeStages& stages) {
    const py::gil_scoped_acquire locked;
    const auto average = py::cpp_function(stages.average, py::call_guard<py::gil_scoped_release>());
    const auto apply = py::cpp_function(stages.apply, py::call_guard<py::gil_scoped_release>());
    return exchange_(number, average, apply).cast<int64_t>();
  });
  renew_marks(part);
}

void OptimizerPlan::renew_marks(Part& part) {
  for_each_entry(part.marks.size(), [&](size_t begin, size_t end) {
    std::for_each(part.marks.begin() + begin, part.marks.begin() + end,
                  [](WeightMark& mark) { mark.renew(); });
  });
}

void OptimizerPlan::renew_marks() {
  for (Part& part : parts_) {
    renew_marks(part);
  }
}

void OptimizerPlan::release() {
  if (collected_) {
    collected_ = false;
    for (Part& part : parts_) {
      part.plan.release();
      part.hypers.clear();
    }
    disown_objects();
  }
}

bool OptimizerPlan::step(const py::list& param_groups, const py::dict& state,
                         const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf) {
  const at::NoGradGuard no_grad;
  Part& part = parts_.at(0);
  StepPlan& plan = part.plan;
  const bool runs_python =
      !part.followed.empty() || plan.has_copies() || c10::impl::dispatch_mode_enabled();
  if (!collect(param_groups, state, !plan.is_short() || runs_python)) {
    return false;
  }
  const auto releasing = release_at_end();
  const at::Device device = plan.device();
  check_accumulator(accumulator, device);
  check_control(control, device);
  passes_on(device).clear(accumulator);
  std::optional<py::gil_scoped_release> unlocked;
  if (owns_) {
    unlocked.emplace();
  }
  if (with_norm) {
    plan.accumulate(accumulator, /*normalize=*/false);
  }
  control_update_(control, accumulator, grad_scale, found_inf);
  run_pass_b(0, control);
  return true;
}

int64_t OptimizerPlan::gradients_copied() const {
  int64_t copied = 0;
  for (const Part& part : parts_) {
    copied += part.plan.gradients_copied();
  }
  return copied;
}

std::vector<std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>>> OptimizerPlan::traces()
    const {
  std::vector<std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>>> all;
  for (const Part& part : parts_) {
    const Traces& traces = part.plan.traces();
    all.emplace_back(traces.norms, traces.lost, part.positions);
  }
  return all;
}

}  // namespace torchopt_ext

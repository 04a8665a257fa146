// Moves the gradients of a step from Python's objects to the plans: OptimizerPlan::collect().
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "python/optimizer_plan.h"

namespace torchopt_ext {

namespace py = pybind11;

namespace {

// Needs no GIL of its own: nobody changes types while the caller holds the GIL.
bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// Calls visit(object) on each object that is not null, in the order of the entries.
template <class Objects, class Visit>
void visit_objects(const Objects& objects, const Visit& visit) {
  for (size_t i = 0; i < objects.size(); ++i) {
    if (i + kEntriesAhead < objects.size()) {
      for (const PyObject* object : objects[i + kEntriesAhead].local) {
        __builtin_prefetch(object, 1);
      }
    }
    for (PyObject* object : objects[i].local) {
      if (object != nullptr) {
        visit(object);
      }
    }
  }
}

}  // namespace

OptimizerPlan::ParamIdentity::ParamIdentity(py::handle param)
    : object(param.ptr()),
      counter(THPVariable_Unpack(object).unsafeGetTensorImpl()->version_counter()) {}

bool OptimizerPlan::ParamIdentity::is_same() const {
  return is_tensor(object) &&
         same_counter(counter, THPVariable_Unpack(object).unsafeGetTensorImpl()->version_counter());
}

void OptimizerPlan::own_objects() {
  if (std::exchange(owns_, true)) {
    return;
  }
  for (const Part& part : parts_) {
    visit_objects(part.objects, [](PyObject* object) { Py_INCREF(object); });
    for (const Followed& followed : part.followed) {
      Py_INCREF(followed.object);
    }
  }
}

void OptimizerPlan::disown_objects() {
  if (!std::exchange(owns_, false)) {
    return;
  }
  for (Part& part : parts_) {
    for (const Followed& followed : part.followed) {
      Py_XDECREF(std::exchange(part.objects[followed.entry].local[followed.array], nullptr));
      Py_DECREF(followed.object);
    }
    visit_objects(part.objects, [](PyObject* object) { Py_DECREF(object); });
  }
}

// Follows DTensors and wrapper subclasses to their local tensors. Returns whether these are the
// same as when the plan was built.
bool OptimizerPlan::follow(Part& part) {
  for (const Followed& followed : part.followed) {
    py::object local = followed.path.follow(followed.object);
    if (local.ptr() != followed.local) {
      return false;
    }
    part.objects[followed.entry].local[followed.array] = local.release().ptr();
  }
  return true;
}

// Takes the tensors and gradients that need no Python.
void OptimizerPlan::collect_unchanged(Part& part) {
  const std::vector<EntryObjects>& objects = part.objects;
  part.plan.collect(
      [&, n = objects.size()](size_t i, StepPlan::TensorImpls& tensors) -> const at::Tensor* {
        if (i + kEntriesAhead < n) {
          for (const PyObject* object : objects[i + kEntriesAhead].local) {
            __builtin_prefetch(object);
          }
        }
        const EntryObjects& entry = objects[i];
        tensors = {};  // not the entry's, which renew() rejects
        if (!entry.param.is_same()) {
          return nullptr;
        }
        for (size_t k = 0; k < tensors.size(); ++k) {
          PyObject* object = entry.local[k];
          if (object != nullptr && is_tensor(object)) {
            tensors[k] = THPVariable_Unpack(object).unsafeGetTensorImpl();
          }
        }
        if (i < part.marks.size() && tensors[kParam] != nullptr) {
          const auto& param = *THPVariable_Unpack(entry.param.object).unsafeGetTensorImpl();
          part.written[i] = !part.marks[i].fits(param, *tensors[kParam]);
        }
        // TensorImpl's grad(): at::Tensor's looks for non-leaf tensors to warn about.
        return entry.path.empty() ? &tensors[entry.stepped]->grad() : nullptr;
      });
}

// Renews entries whose tensors changed, such as by memory replaced under a tensor. Returns false if
// the changed tensors fail a check.
bool OptimizerPlan::attach_changed(Part& part) {
  std::vector<size_t> changed;
  for (size_t i = 0; i < part.objects.size(); ++i) {
    if (part.plan.pending(i) == StepPlan::Pending::kTensorsChanged) {
      changed.push_back(i);
    }
  }
  if (changed.empty()) {
    return true;
  }
  own_objects();
  try {
    part.plan.renew(changed);
  } catch (const c10::Error&) {
    return false;  // the optimizer then makes the state fit, or reports the error
  }
  return true;
}

// Takes the gradients that collect_unchanged() did not take.
void OptimizerPlan::set_pending_gradients(Part& part) {
  const std::vector<EntryObjects>& objects = part.objects;
  StepPlan& plan = part.plan;
  std::vector<size_t> to_unwrap;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (plan.pending(i) == StepPlan::Pending::kNothing) {
      continue;
    }
    own_objects();
    const at::Tensor& gradient =
        THPVariable_Unpack(objects[i].param.object).unsafeGetTensorImpl()->grad();
    const bool distributed = objects[i].path.distributed;
    if (!gradient.defined() ||
        !(distributed || gradient.unsafeGetTensorImpl()->is_python_dispatch())) {
      plan.set_gradient(i, gradient);
      continue;
    }
    py::object local = py::none();
    if (distributed) {
      local = plain_local_gradient(objects[i].param.object, py::cast(gradient).ptr());
    }
    if (local.is_none()) {
      to_unwrap.push_back(i);
    } else {
      plan.set_gradient(i, THPVariable_Unpack(local.ptr()));
    }
  }
  if (!to_unwrap.empty()) {
    py::list params;
    for (const size_t i : to_unwrap) {
      params.append(py::handle(objects[i].param.object));
    }
    const py::list locals = local_gradients_(params);
    for (size_t k = 0; k < to_unwrap.size(); ++k) {
      const py::object local = locals[k];
      plan.set_gradient(to_unwrap[k],
                        local.is_none() ? at::Tensor() : THPVariable_Unpack(local.ptr()));
    }
  }
}

// Lets masters follow weights that user code has written to since the last step.
void OptimizerPlan::take_written_weights(Part& part) {
  for (size_t i = 0; i < part.written.size(); ++i) {
    if (part.written[i] != 0) {
      own_objects();
      const auto& [param, local, path, stepped] = part.objects[i];
      const at::Tensor& weight = THPVariable_Unpack(local[kParam]);
      if (local[kMaster] != nullptr && stepped == kParam) {  // not with a low-precision copy
        take_weight(THPVariable_Unpack(local[kMaster]), weight);
      }
      part.marks[i] = param.mark(weight);
    }
  }
}

std::vector<OptimizerPlan::Collected> OptimizerPlan::collected() const {
  TORCH_CHECK(collected_, "gradients have not been collected");
  std::vector<Collected> all(parts_.size());
  for (size_t k = 0; k < parts_.size(); ++k) {
    const Part& part = parts_[k];
    for (size_t i = 0; i < part.objects.size(); ++i) {
      const at::Tensor& gradient = part.plan.gradient(i);
      if (gradient.defined()) {
        const auto& [param, local, path, stepped] = part.objects[i];
        const bool has_master = stepped == kParam && local[kMaster] != nullptr;
        all[k].positions.push_back(part.positions[i]);
        all[k].params.append(py::handle(local[stepped]));
        all[k].masters.append(has_master ? py::handle(local[kMaster]) : py::none());
        all[k].gradients.push_back(gradient);
      }
    }
  }
  return all;
}

WeightMark OptimizerPlan::ParamIdentity::mark(const at::Tensor& shard) const {
  return {*THPVariable_Unpack(object).unsafeGetTensorImpl(), *shard.unsafeGetTensorImpl()};
}

py::dict OptimizerPlan::weight_marks() const {
  py::dict marks;
  for (const Part& part : parts_) {
    for (size_t i = 0; i < part.marks.size(); ++i) {
      const auto id = reinterpret_cast<uintptr_t>(part.objects[i].param.object);
      marks[py::int_(id)] = WeightMarks{{part.marks[i]}};
    }
  }
  return marks;
}

}  // namespace torchopt_ext

// Moves the gradients of a step from Python's objects to the plans: OptimizerPlan::collect().
#include <torch/csrc/autograd/python_variable.h>

#include "python/optimizer_plan.h"

namespace torchopt_ext {

namespace py = pybind11;

// Takes the tensors and gradients that need no Python.
void OptimizerPlan::collect_unchanged(Part& part) {
  const std::vector<EntryObjects>& objects = part.objects;
  part.plan.collect([&, n = objects.size()](size_t i,
                                            StepPlan::TensorImpls& tensors) -> const at::Tensor* {
    if (i + kEntriesAhead < n) {
      for (const py::object& object : objects[i + kEntriesAhead].local) {
        __builtin_prefetch(object.ptr());
      }
    }
    for (size_t k = 0; k < tensors.size(); ++k) {
      PyObject* object = objects[i].local[k].ptr();
      tensors[k] = object == Py_None ? nullptr : THPVariable_Unpack(object).unsafeGetTensorImpl();
    }
    if (i < part.marks.size()) {
      const auto& param = *THPVariable_Unpack(objects[i].param.ptr()).unsafeGetTensorImpl();
      part.written[i] = !part.marks[i].fits(param, *tensors[kParam]);
    }
    // TensorImpl's grad(): at::Tensor's looks for non-leaf tensors to warn about.
    return objects[i].path.empty() ? &tensors[objects[i].own]->grad() : nullptr;
  });
}

// Renews entries whose tensors changed, such as by memory replaced under a tensor. Returns false if
// a parameter has another local tensor than before, or if the changed tensors fail a check.
bool OptimizerPlan::attach_changed(Part& part) {
  const std::vector<EntryObjects>& objects = part.objects;
  std::vector<size_t> changed;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (part.plan.pending(i) == StepPlan::Pending::kNothing) {
      continue;
    }
    const LocalPath& path = objects[i].path;
    if (!path.empty() &&
        !path.follow(objects[i].param.ptr()).is(objects[i].local[objects[i].own])) {
      return false;
    }
    if (part.plan.pending(i) == StepPlan::Pending::kAll) {
      changed.push_back(i);
    }
  }
  if (changed.empty()) {
    return true;
  }
  try {
    part.plan.renew(changed);
  } catch (const c10::Error&) {
    return false;  // the optimizer then makes the state fit, or reports the error
  }
  return true;
}

// Takes the gradients that collect_unchanged() did not take.
void OptimizerPlan::set_pending_gradients(Part& part) const {
  const std::vector<EntryObjects>& objects = part.objects;
  StepPlan& plan = part.plan;
  py::list to_unwrap;
  std::vector<size_t> their_index;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (plan.pending(i) == StepPlan::Pending::kNothing) {
      continue;
    }
    const at::Tensor& gradient =
        THPVariable_Unpack(objects[i].param.ptr()).unsafeGetTensorImpl()->grad();
    const bool distributed = objects[i].path.distributed;
    if (!gradient.defined() ||
        !(distributed || gradient.unsafeGetTensorImpl()->is_python_dispatch())) {
      plan.set_gradient(i, gradient);
      continue;
    }
    py::object local = py::none();
    if (distributed) {
      local = plain_local_gradient(objects[i].param.ptr(), py::cast(gradient).ptr());
    }
    if (local.is_none()) {
      to_unwrap.append(objects[i].param);
      their_index.push_back(i);
    } else {
      plan.set_gradient(i, THPVariable_Unpack(local.ptr()));
    }
  }
  if (!their_index.empty()) {
    const py::list locals = local_gradients_(to_unwrap);
    for (size_t k = 0; k < their_index.size(); ++k) {
      const py::object local = locals[k];
      plan.set_gradient(their_index[k],
                        local.is_none() ? at::Tensor() : THPVariable_Unpack(local.ptr()));
    }
  }
}

// Lets masters follow weights that user code has written to since the last step.
void OptimizerPlan::take_written_weights(Part& part) {
  for (size_t i = 0; i < part.written.size(); ++i) {
    if (part.written[i] != 0) {
      const auto& [param, local, path, own] = part.objects[i];
      if (!local[kMaster].is_none() && own == kParam) {  // not with a low-precision copy
        take_weight(THPVariable_Unpack(local[kMaster].ptr()),
                    THPVariable_Unpack(local[kParam].ptr()));
      }
      part.marks[i] = mark_of(part.objects[i]);
    }
  }
}

WeightMark OptimizerPlan::mark_of(const EntryObjects& objects) {
  return {*THPVariable_Unpack(objects.param.ptr()).unsafeGetTensorImpl(),
          *THPVariable_Unpack(objects.local[kParam].ptr()).unsafeGetTensorImpl()};
}

py::dict OptimizerPlan::weight_marks() const {
  py::dict marks;
  for (const Part& part : parts_) {
    for (size_t i = 0; i < part.marks.size(); ++i) {
      const auto id = reinterpret_cast<uintptr_t>(part.objects[i].param.ptr());
      marks[py::int_(id)] = WeightMarks{{part.marks[i]}};
    }
  }
  return marks;
}

}  // namespace torchopt_ext

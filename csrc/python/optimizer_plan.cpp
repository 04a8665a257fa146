#include "python/optimizer_plan.h"

#include <torch/csrc/autograd/python_variable.h>

#include "step_ops.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// A param group's arguments, under the keys of torch.optim.AdamW.
GroupHyper read_group(const py::handle& group, at::Device device) {
  GroupHyper hyper{};
  const py::object lr = group["lr"];
  if (THPVariable_Check(lr.ptr())) {
    hyper.lr = THPVariable_Unpack(lr.ptr());
    check_lr(hyper.lr, device);
  } else {
    hyper.adam.lr = py::float_(lr);
  }
  const py::sequence betas = group["betas"];
  hyper.adam.beta1 = py::float_(betas[0]);
  hyper.adam.beta2 = py::float_(betas[1]);
  hyper.adam.eps = py::float_(group["eps"]);
  hyper.adam.weight_decay = py::float_(group["weight_decay"]);
  hyper.adam.maximize = py::bool_(group["maximize"]);
  hyper.adam.decoupled_weight_decay = py::bool_(group["decoupled_weight_decay"]);
  return hyper;
}

// An undefined tensor for None.
at::Tensor unpack(PyObject* object) {
  return object == Py_None ? at::Tensor() : THPVariable_Unpack(object);
}

// Marks that the interpreter is unlocked while the plan is in use: another thread's step must not
// change it meanwhile. Set and read with the interpreter locked.
class Running {
 public:
  explicit Running(bool& flag) : flag_(flag) { flag_ = true; }
  ~Running() { flag_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  bool& flag_;
};

// Calls release() when a step ends, however it ends: a gradient must not outlive it.
class ReleaseAtEnd {
 public:
  explicit ReleaseAtEnd(OptimizerPlan& plan) : plan_(&plan) {}
  ~ReleaseAtEnd() {
    if (plan_ != nullptr) {
      plan_->release();
    }
  }
  ReleaseAtEnd(const ReleaseAtEnd&) = delete;
  ReleaseAtEnd& operator=(const ReleaseAtEnd&) = delete;
  void cancel() { plan_ = nullptr; }

 private:
  OptimizerPlan* plan_;
};

}  // namespace

OptimizerPlan::OptimizerPlan(const py::list& param_groups, const py::dict& state,
                             const std::vector<Param>& params,
                             const std::vector<at::Device>& part_devices, const py::list& idle,
                             py::object local_gradient)
    : snapshot_(param_groups, state),
      objects_(part_devices.size()),
      hypers_(part_devices.size()),
      local_gradient_(std::move(local_gradient)) {
  std::vector<std::vector<StepPlan::Entry>> entries(part_devices.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Param& param = params[i];
    std::array<at::Tensor, 5> local;
    Objects objects{param.param.ptr(), {}, !param.param.is(param.local[0])};
    for (size_t k = 0; k < local.size(); ++k) {
      objects.local[k] = param.local[k].ptr();
      local[k] = unpack(objects.local[k]);
    }
    objects_.at(param.part).push_back(objects);
    entries[param.part].push_back({.param = local[0],
                                   .exp_avg = local[1],
                                   .exp_avg_sq = local[2],
                                   .max_exp_avg_sq = local[3],
                                   .step = local[4],
                                   .group = param.group,
                                   .name = param.name,
                                   .position = i});
  }
  for (const py::handle param : idle) {
    idle_.push_back(param.ptr());
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    plans_.emplace_back(std::move(entries[i]), part_devices[i]);
  }
  release();
}

py::list OptimizerPlan::objects() const {
  py::list list = snapshot_.objects();
  for (const auto& part : objects_) {
    for (const Objects& objects : part) {
      for (PyObject* local : objects.local) {
        list.append(py::handle(local));
      }
    }
  }
  return list;
}

bool OptimizerPlan::collect(const py::list& param_groups, const py::dict& state) {
  check_idle();
  if (!snapshot_.matches(param_groups, state)) {
    return false;
  }
  for (PyObject* param : idle_) {
    if (THPVariable_Unpack(param).grad().defined()) {
      return false;
    }
  }
  ReleaseAtEnd releasing(*this);
  for (size_t part = 0; part < plans_.size(); ++part) {
    for (size_t i = 0; i < objects_[part].size(); ++i) {
      const Objects& objects = objects_[part][i];
      if (objects.wrapped) {
        const py::object local = py::handle(objects.param).attr("_local_tensor");
        if (local.ptr() != objects.local[0]) {
          return false;
        }
      }
      std::array<at::Tensor, 5> local;
      for (size_t k = 0; k < local.size(); ++k) {
        local[k] = unpack(objects.local[k]);
      }
      plans_[part].attach(i, std::move(local));
    }
    if (!plans_[part].unchanged()) {
      return false;
    }
  }
  for (size_t part = 0; part < plans_.size(); ++part) {
    for (size_t i = 0; i < objects_[part].size(); ++i) {
      const Objects& objects = objects_[part][i];
      const at::Tensor& gradient = plans_[part].param(i).grad();
      // Python knows what a DTensor or a collective still under way stands for.
      if (objects.wrapped || (gradient.defined() && gradient.unsafeGetTensorImpl()->key_set().has(
                                                        c10::DispatchKey::Python))) {
        const py::object local = local_gradient_(py::handle(objects.param));
        plans_[part].set_gradient(i, unpack(local.ptr()));
      } else {
        plans_[part].set_gradient(i, gradient);
      }
    }
    hypers_[part].clear();
    for (const py::handle group : param_groups) {
      hypers_[part].push_back(read_group(group, plans_[part].device()));
    }
  }
  releasing.cancel();
  return true;
}

void OptimizerPlan::check_idle() const {
  TORCH_CHECK(!running_, "another thread is stepping this optimizer");
}

void OptimizerPlan::accumulate(size_t part, const at::Tensor& accumulator) {
  check_idle();
  check_accumulator(accumulator);
  const Running running(running_);
  const py::gil_scoped_release unlocked;
  plans_.at(part).accumulate(accumulator);
}

void OptimizerPlan::update(const std::vector<at::Tensor>& part_controls) {
  check_idle();
  const ReleaseAtEnd releasing(*this);
  TORCH_CHECK(part_controls.size() == plans_.size(), "got ", part_controls.size(),
              " control blocks for ", plans_.size(), " parts");
  for (const at::Tensor& control : part_controls) {
    check_control(control);
  }
  const Running running(running_);
  const py::gil_scoped_release unlocked;
  for (size_t i = 0; i < plans_.size(); ++i) {
    plans_[i].update(hypers_[i], part_controls[i]);
  }
}

void OptimizerPlan::release() {
  if (running_) {
    return;  // the thread that is stepping will
  }
  for (StepPlan& plan : plans_) {
    plan.release();
  }
}

bool OptimizerPlan::step(const py::list& param_groups, const py::dict& state,
                         const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf) {
  if (!collect(param_groups, state)) {
    return false;
  }
  const ReleaseAtEnd releasing(*this);
  accumulator.zero_();
  if (with_norm) {
    accumulate(0, accumulator);
  }
  control_update_(control, accumulator, grad_scale, found_inf);
  update({control});
  return true;
}

std::vector<at::Device> OptimizerPlan::part_devices() const {
  std::vector<at::Device> devices;
  devices.reserve(plans_.size());
  for (const StepPlan& plan : plans_) {
    devices.push_back(plan.device());
  }
  return devices;
}

int64_t OptimizerPlan::gradients_copied() const {
  int64_t copied = 0;
  for (const StepPlan& plan : plans_) {
    copied += plan.gradients_copied();
  }
  return copied;
}

}  // namespace torchopt_ext

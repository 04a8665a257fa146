#include "python/optimizer_plan.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include "step_ops.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// A param group's arguments, under the keys of torch.optim.AdamW.
GroupHyper read_group(const py::handle& group, bool decoupled_weight_decay, at::Device device) {
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
  hyper.adam.decoupled_weight_decay = decoupled_weight_decay;
  return hyper;
}

}  // namespace

OptimizerPlan::OptimizerPlan(const py::list& param_groups, const py::dict& state,
                             std::vector<Param> params, const std::vector<at::Device>& part_devices,
                             std::vector<at::Tensor> idle, bool decoupled_weight_decay,
                             py::object local_gradient)
    : snapshot_(param_groups, state),
      idle_(std::move(idle)),
      decoupled_weight_decay_(decoupled_weight_decay),
      local_gradient_(std::move(local_gradient)) {
  std::vector<std::vector<StepPlan::Entry>> entries(part_devices.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Param& param = params[i];
    auto& part = entries.at(param.part);
    if (py::hasattr(param.param, "_local_tensor")) {
      wrapped_.push_back({param.param, param.param.attr("_local_tensor"), param.part, part.size()});
    }
    part.push_back({.param = param.local,
                    .exp_avg = param.exp_avg,
                    .exp_avg_sq = param.exp_avg_sq,
                    .max_exp_avg_sq = param.max_exp_avg_sq.value_or(at::Tensor()),
                    .step = param.step,
                    .group = param.group,
                    .name = std::move(param.name),
                    .position = i});
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    plans_.emplace_back(std::move(entries[i]), part_devices[i]);
  }
}

bool OptimizerPlan::collect(const py::list& param_groups, const py::dict& state) {
  if (!snapshot_.matches(param_groups, state)) {
    return false;
  }
  for (const Wrapped& wrapped : wrapped_) {
    const py::object local = wrapped.param.attr("_local_tensor");
    if (!local.is(wrapped.local)) {
      return false;
    }
  }
  for (const at::Tensor& param : idle_) {
    if (param.grad().defined()) {
      return false;
    }
  }
  for (const StepPlan& plan : plans_) {
    if (!plan.unchanged()) {
      return false;
    }
  }
  for (StepPlan& plan : plans_) {
    plan.collect_gradients();
  }
  for (const Wrapped& wrapped : wrapped_) {
    const py::object gradient = local_gradient_(wrapped.param);
    plans_[wrapped.part].set_gradient(
        wrapped.index, gradient.is_none() ? at::Tensor() : THPVariable_Unpack(gradient.ptr()));
  }
  return true;
}

void OptimizerPlan::accumulate(size_t part, const at::Tensor& accumulator) const {
  check_accumulator(accumulator);
  const py::gil_scoped_release unlocked;
  plans_.at(part).accumulate(accumulator);
}

void OptimizerPlan::update(const py::list& param_groups,
                           const std::vector<at::Tensor>& part_controls) {
  TORCH_CHECK(part_controls.size() == plans_.size(), "got ", part_controls.size(),
              " control blocks for ", plans_.size(), " parts");
  std::vector<std::vector<GroupHyper>> hypers(plans_.size());
  for (size_t i = 0; i < plans_.size(); ++i) {
    check_control(part_controls[i]);
    for (const py::handle group : param_groups) {
      hypers[i].push_back(read_group(group, decoupled_weight_decay_, plans_[i].device()));
    }
  }
  const py::gil_scoped_release unlocked;
  for (size_t i = 0; i < plans_.size(); ++i) {
    plans_[i].update(hypers[i], part_controls[i]);
    plans_[i].drop_gradients();
  }
}

bool OptimizerPlan::step(const py::list& param_groups, const py::dict& state,
                         const at::Tensor& control, const at::Tensor& accumulator, bool with_norm,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf) {
  if (!collect(param_groups, state)) {
    return false;
  }
  accumulator.zero_();
  if (with_norm) {
    accumulate(0, accumulator);
  }
  control_update_(control, accumulator, grad_scale, found_inf);
  update(param_groups, {control});
  return true;
}

std::vector<at::Device> OptimizerPlan::part_devices() const {
  std::vector<at::Device> devices;
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

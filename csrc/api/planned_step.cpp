#include "api/planned_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>

#include <cmath>

#include "kernels/exact_accumulator.h"
#include "ops/operators.h"

namespace torchopt_ext {
namespace {

using torch::optim::OptimizerParamGroup;

FusedAdamWParamState* state_of(const PlannedStep::State& state, const at::Tensor& param) {
  const auto at = state.find(param.unsafeGetTensorImpl());
  return at == state.end() ? nullptr : static_cast<FusedAdamWParamState*>(at->second.get());
}

// Calls visit(group, index in the group, index among all parameters, parameter) in order.
template <class Visit>
void for_each_param(const PlannedStep::Groups& groups, const Visit& visit) {
  size_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& params = groups[g].params();
    for (size_t i = 0; i < params.size(); ++i) {
      visit(g, i, number++, params[i]);
    }
  }
}

bool has_gradient(const at::Tensor& param) { return param.unsafeGetTensorImpl()->grad().defined(); }

std::vector<size_t> sizes_of(const PlannedStep::Groups& groups) {
  std::vector<size_t> sizes;
  for (const OptimizerParamGroup& group : groups) {
    sizes.push_back(group.params().size());
  }
  return sizes;
}

int64_t index_of(double Control::*field) {
  static constexpr Control kNone{};
  const auto address = [](const void* x) { return static_cast<const char*>(x); };
  return (address(&(kNone.*field)) - address(&kNone)) / int64_t{sizeof(double)};
}

// Returns `tensor` with a new moment's device and strides. Copies `tensor` only if they differ.
at::Tensor like_new_moment(const at::Tensor& tensor, const char* role, const at::Tensor& param,
                           const Label& param_what) {
  TORCH_CHECK(tensor.sizes() == param.sizes(), role, " of ", param_what, " has shape ",
              tensor.sizes(), ", expected ", param.sizes(), " as the parameter");
  TORCH_CHECK(tensor.scalar_type() == param.scalar_type(), role, " of ", param_what, " has dtype ",
              dtype_name(tensor.scalar_type()), ", expected ", dtype_name(param.scalar_type()),
              " as the parameter");
  const at::Tensor like = at::empty_like(param, at::MemoryFormat::Preserve);
  return tensor.device() == like.device() && same_layout(tensor, like) ? tensor
                                                                       : like.copy_(tensor);
}

}  // namespace

const FusedAdamWOptions& options_of(const OptimizerParamGroup& group) {
  const auto* options = dynamic_cast<const FusedAdamWOptions*>(&group.options());
  TORCH_CHECK(options != nullptr,
              "a param group of FusedAdamW has another optimizer's options, expected "
              "torchopt_ext::FusedAdamWOptions");
  return *options;
}

Hyper hyper_of(const FusedAdamWOptions& options) {
  Hyper hyper{};
  const auto [beta1, beta2] = options.betas();
  hyper.value[kLr] = options.lr();
  hyper.value[kWeightDecay] = options.weight_decay();
  hyper.value[kDecoupled] = options.decoupled_weight_decay() ? 1.0 : 0.0;
  hyper.value[kMaximize] = options.maximize() ? 1.0 : 0.0;
  hyper.value[Adam::kBeta1] = beta1;
  hyper.value[Adam::kBeta2] = beta2;
  hyper.value[Adam::kEps] = options.eps();
  hyper.value[Adam::kBiasCorrection] = 1.0;
  check_hyper(kNumberOf<Adam>, hyper);
  return hyper;
}

Label PlannedStep::what(size_t number, const at::Tensor& param) const {
  const auto named = names_.find(param.unsafeGetTensorImpl());
  return {"parameter", number, named == names_.end() ? nullptr : &named->second};
}

void PlannedStep::fit_state(const Groups& groups, State& state) const {
  for_each_param(groups, [&](size_t g, size_t, size_t number, const at::Tensor& param) {
    FusedAdamWParamState* param_state = state_of(state, param);
    if (param_state != nullptr && param.requires_grad()) {
      fit(*param_state, options_of(groups[g]).amsgrad(), number, param);
    }
  });
}

// Moves a parameter's state to its device and storage order.
void PlannedStep::fit(FusedAdamWParamState& param_state, bool amsgrad, size_t number,
                      const at::Tensor& param) const {
  const Label param_what = what(number, param);
  TORCH_CHECK(param_state.step().defined() && param_state.exp_avg().defined() &&
                  param_state.exp_avg_sq().defined(),
              "the state of ", param_what, " lacks step, exp_avg or exp_avg_sq");
  param_state.step(param_state.step().to(param.device(), at::kFloat).reshape({}));
  if (amsgrad && !param_state.max_exp_avg_sq().defined()) {
    param_state.max_exp_avg_sq(at::zeros_like(param, at::MemoryFormat::Preserve));
  }
  for_each_moment(param_state, param_state.max_exp_avg_sq().defined(),
                  [&](int k, at::Tensor& moment) {
                    moment = like_new_moment(moment, Adam::kStates[k].name, param, param_what);
                  });
}

// Makes the state of parameters with a first gradient, and lists them in `begun`. Plans the
// parameters with a gradient, and those of a plan that fits: they had one before.
void PlannedStep::build(const Groups& groups, State& state, std::vector<at::Tensor>& begun) {
  if (!plan_) {
    planned_.clear();
  }
  plan_.reset();
  for_each_param(groups, [&](size_t, size_t, size_t number, const at::Tensor& param) {
    if (number == planned_.size()) {
      planned_.push_back(false);
    }
    planned_[number] = planned_[number] || has_gradient(param);
    if (planned_[number] && state_of(state, param) == nullptr) {
      check_supported(param, what(number, param), /*complex=*/true);
      begun.push_back(param);
    }
  });
  if (!begun.empty()) {
    // All step counts share one vector, which a step passes over once.
    const at::Tensor steps = at::zeros({static_cast<int64_t>(begun.size())},
                                       begun[0].options().dtype(at::kFloat).requires_grad(false));
    for (size_t i = 0; i < begun.size(); ++i) {
      auto param_state = std::make_unique<FusedAdamWParamState>();
      param_state->step(steps[static_cast<int64_t>(i)]);
      for_each_moment(*param_state, /*with_max=*/false, [&](int, at::Tensor& moment) {
        moment = at::zeros_like(begun[i], at::MemoryFormat::Preserve);
      });
      state[begun[i].unsafeGetTensorImpl()] = std::move(param_state);
    }
  }
  slots_.clear();
  std::vector<StepPlan::Entry> entries;
  for_each_param(groups, [&](size_t g, size_t index, size_t number, const at::Tensor& param) {
    if (!planned_[number]) {
      return;
    }
    slots_.push_back({g, index});
    const bool amsgrad = options_of(groups[g]).amsgrad();
    FusedAdamWParamState* param_state = state_of(state, param);
    fit(*param_state, amsgrad, number, param);
    StepPlan::Entry entry;
    entry.tensors[kParam] = param;
    for_each_moment(*param_state, amsgrad, [&](int k, const at::Tensor& moment) {
      entry.tensors[state_array(k)] = moment;
    });
    entry.tensors[kStep] = param_state->step();
    entry.group = static_cast<int32_t>(g);
    if (const std::string* name = what(number, param).name) {
      entry.name = *name;
    }
    entry.position = number;
    entries.push_back(std::move(entry));
  });
  group_sizes_ = sizes_of(groups);
  const at::Device device =
      entries.empty() ? at::Device(at::kCPU) : entries[0].tensors[kParam].device();
  plan_ = std::make_unique<StepPlan>(entries, device);
}

// Takes this step's gradients. Returns false if a parameter out of the plan has a gradient, or if
// the plan does not fit, because tensors were replaced: then there is no plan any more.
bool PlannedStep::collect(const Groups& groups, const State& state) {
  if (!plan_ || sizes_of(groups) != group_sizes_) {
    plan_.reset();
    return false;
  }
  const auto param_at = [&](const Slot& slot) -> const at::Tensor& {
    return groups[slot.group].params()[slot.index];
  };
  std::vector<bool> amsgrad;
  for (const OptimizerParamGroup& group : groups) {
    amsgrad.push_back(options_of(group).amsgrad());
  }
  const auto read = [&](size_t i, StepPlan::TensorImpls& tensors) -> const at::Tensor* {
    const at::Tensor& param = param_at(slots_[i]);
    const FusedAdamWParamState* param_state = state_of(state, param);
    tensors = {};
    if (param_state == nullptr) {
      return nullptr;  // no tensors: differs from the record
    }
    tensors[kParam] = param.unsafeGetTensorImpl();
    for_each_moment(*param_state, amsgrad[slots_[i].group], [&](int k, const at::Tensor& moment) {
      tensors[state_array(k)] = moment.unsafeGetTensorImpl();
    });
    tensors[kStep] = param_state->step().unsafeGetTensorImpl();
    return &param.unsafeGetTensorImpl()->grad();
  };
  if (!plan_->collect(read)) {
    plan_.reset();
    return false;
  }
  bool complete = true;
  for_each_param(groups, [&](size_t, size_t, size_t number, const at::Tensor& param) {
    complete = complete && (planned_[number] || !has_gradient(param));
  });
  for (size_t i = 0; complete && i < slots_.size(); ++i) {
    if (plan_->pending(i) == StepPlan::Pending::kGradient) {
      plan_->set_gradient(i, param_at(slots_[i]).unsafeGetTensorImpl()->grad());
    }
  }
  return complete;
}

void PlannedStep::set_control(double max_grad_norm, bool skip_nonfinite) {
  const std::pair settings(max_grad_norm, skip_nonfinite);
  if (!control_.defined()) {
    Control initial{};
    initial.clip_factor = initial.grad_factor = initial.grad_scale = 1.0;
    initial.loss_scale = initial.lr_factor = 1.0;
    control_ = at::from_blob(&initial, {kControlSize}, at::kDouble).clone();
  }
  if (control_.device() != plan_->device() || !accumulator_.defined()) {
    control_ = control_.to(plan_->device());
    accumulator_ = at::empty({ExactAccumulator::kSize}, control_.options().dtype(at::kLong));
  }
  if (settings != settings_) {  // each write is a kernel on a GPU
    settings_ = settings;
    control_[index_of(&Control::max_grad_norm)] = std::isinf(max_grad_norm) ? 0.0 : max_grad_norm;
    control_[index_of(&Control::skip_nonfinite)] = skip_nonfinite ? 1.0 : 0.0;
  }
  accumulator_.zero_();
}

void PlannedStep::step(const Groups& groups, State& state, double max_grad_norm,
                       bool skip_nonfinite) {
  TORCH_CHECK_VALUE(max_grad_norm >= 0.0, "Invalid max_grad_norm: ", max_grad_norm,
                    ", expected 0 or more");
  const at::NoGradGuard no_grad;
  std::vector<GroupHyper> hypers;
  for (const OptimizerParamGroup& group : groups) {
    hypers.push_back({kNumberOf<Adam>, hyper_of(options_of(group)), {}});
  }
  // A gradient must not outlive the step, even if the step raises.
  const auto releasing = c10::make_scope_exit([this] {
    if (plan_) {
      plan_->release();
    }
  });
  std::vector<at::Tensor> begun;
  auto forgetting = c10::make_scope_exit([&] {  // if the step raises
    for (const at::Tensor& param : begun) {
      state.erase(param.unsafeGetTensorImpl());
    }
  });
  if (!collect(groups, state)) {
    build(groups, state, begun);
    TORCH_CHECK(collect(groups, state), "the parameters changed while the step was prepared");
  }
  set_control(max_grad_norm, skip_nonfinite);
  norm_was_measured_ = max_grad_norm > 0.0 || skip_nonfinite;
  if (norm_was_measured_) {
    plan_->accumulate(accumulator_, /*normalize=*/false);
  }
  control_update_(control_, accumulator_, std::nullopt, std::nullopt);
  plan_->update(hypers, control_);
  forgetting.release();
}

at::Tensor PlannedStep::control(double Control::*field) const {
  return control_.defined() ? control_[index_of(field)].clone() : at::zeros({}, at::kDouble);
}

}  // namespace torchopt_ext

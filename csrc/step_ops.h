// The operators of a step, the same for every device: they check their arguments, build a plan and
// run it through the device's back end (plan/backend.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/adam_args.h"

namespace torchopt_ext {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator);

at::Tensor accumulator_total(const at::Tensor& accumulator);

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList state_steps,
           const at::Tensor& control, double lr, double beta1, double beta2, double eps,
           double weight_decay, bool decoupled_weight_decay, bool maximize);

void adam_tensor_lr_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                     at::TensorList state_steps, const at::Tensor& control, const at::Tensor& lr,
                     double beta1, double beta2, double eps, double weight_decay,
                     bool decoupled_weight_decay, bool maximize);

// Shared with the optimizer classes (python/optimizer_plan.cpp).
void check_accumulator(const at::Tensor& accumulator);
void check_control(const at::Tensor& control);
// Ranges of torch.optim.AdamW; raises naming the argument.
void check_hyper(const AdamHyper& hyper);
void check_lr(const at::Tensor& lr, at::Device device);

}  // namespace torchopt_ext

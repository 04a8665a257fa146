// The operators of a step, the same for every device: they check their arguments, build a plan and
// run it through the device's back end (plan/backend.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "kernels/adam_args.h"

namespace torchopt_ext {

// Registers the operators with the library fragment of one dispatch key.
void register_step_ops(torch::Library& m);

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

void loss_scale_update_(const at::Tensor& control, const at::Tensor& found_inf,
                        const at::Tensor& scale);

void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale);

// Shared with the optimizer classes (python/optimizer_plan.cpp).
void check_accumulator(const at::Tensor& accumulator);
void check_control(const at::Tensor& control);
// Ranges of torch.optim.AdamW; raises naming the argument.
void check_hyper(const AdamHyper& hyper);
void check_lr(const at::Tensor& lr, at::Device device);

}  // namespace torchopt_ext

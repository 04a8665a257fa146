// Operators that other folders call, too. Each is defined in the file of its name.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchopt_ext {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator);
void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale);
void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);
double lr_factor_op(int64_t step, int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                    c10::string_view decay_type, double min_factor, int64_t generation);

}  // namespace torchopt_ext

// Operators that other folders call, too. Each is defined in the file of its name.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchopt_ext {

void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale);
void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

}  // namespace torchopt_ext

// control_update_, also for the optimizer classes.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

}  // namespace torchopt_ext

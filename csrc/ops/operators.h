// Operators that other folders call, too. Each is defined in the file of its name.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator);
void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale);

}  // namespace torchopt_ext

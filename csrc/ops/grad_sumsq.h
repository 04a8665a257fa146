#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator);

}  // namespace torchopt_ext

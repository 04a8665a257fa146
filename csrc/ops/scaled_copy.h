// scaled_copy_, also for the Python module.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale);

}  // namespace torchopt_ext

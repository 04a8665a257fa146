// loss_scale_update_, also for the Python module.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

void loss_scale_update_(const at::Tensor& control, const at::Tensor& found_inf,
                        const at::Tensor& scale);

}  // namespace torchopt_ext

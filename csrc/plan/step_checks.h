// Checks of what a step takes besides its lists of tensors, shared by the operators and the
// optimizer classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/adam.h"

namespace torchopt_ext {

// On any device, or on the one that is given.
void check_accumulator(const at::Tensor& accumulator,
                       std::optional<at::Device> device = std::nullopt);
void check_control(const at::Tensor& control, std::optional<at::Device> device = std::nullopt);
// One element of float32 or, where it may be, float64.
void check_scalar(const at::Tensor& tensor, const char* what, at::Device device,
                  bool or_double = false);
// Ranges of torch.optim.AdamW; raises naming the argument.
void check_hyper(const AdamHyper& hyper);
void check_lr(const at::Tensor& lr, at::Device device);

}  // namespace torchopt_ext

// Checks of a step's arguments other than its lists of tensors, shared by the operators and the
// optimizer classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/adam.h"

namespace torchopt_ext {

// Without `device` the tensor may be on any device.
void check_accumulator(const at::Tensor& accumulator,
                       std::optional<at::Device> device = std::nullopt);
void check_control(const at::Tensor& control, std::optional<at::Device> device = std::nullopt);
// Raises unless `tensor` is one element of float32 or, with `or_double`, float64.
void check_scalar(const at::Tensor& tensor, const char* what, at::Device device,
                  bool or_double = false);
// Raises, naming the argument, outside the ranges of torch.optim.AdamW. lr may be below 0.
void check_hyper(const AdamHyper& hyper);
void check_lr(const at::Tensor& lr, at::Device device);

}  // namespace torchopt_ext

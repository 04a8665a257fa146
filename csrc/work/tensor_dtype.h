// The reals in a tensor's memory: a complex tensor is stepped as its view_as_real().
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/dtype.h"

namespace torchopt_ext {

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "dtype ", tensor.scalar_type(), " is not supported");
  }
}

inline int64_t reals_per_element(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

}  // namespace torchopt_ext

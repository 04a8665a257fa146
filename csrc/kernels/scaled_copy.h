// The copy that converts between element types: from gradients to unscaled and clipped gradients in
// the type a step needs, and from master weights to the parameters' type.
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {
namespace {

// Scales a register. A factor of 1 keeps every value, so that a plain copy needs no second loop.
template <class L>
TORCHOPT_HD inline typename L::reg scaled(typename L::reg x, typename L::scalar factor) {
  return L::canonical(L::mul(x, L::set1(factor)));
}

// float64 converts only to and from float64.
TORCHOPT_HD constexpr bool can_copy(DType to, DType from) {
  return (to == DType::kFloat64) == (from == DType::kFloat64);
}

// Returns whether a copy onto its own source would change only the form of a NaN; it is skipped.
TORCHOPT_HD inline bool is_noop_copy(const void* to, const void* from, DType dtype, double factor) {
  return to == from &&
         (dtype == DType::kFloat64 ? factor : static_cast<double>(static_cast<float>(factor))) ==
             1.0;
}

}  // namespace
}  // namespace torchopt_ext

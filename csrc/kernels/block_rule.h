// The block rule of the sum of squares (docs/numerics.md section 3): its constants, and the
// square of an element.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

inline constexpr int64_t kBlockElements = 4096;
inline constexpr int kBlockLanes = 64;
inline constexpr int64_t kShortRow = 64;

namespace {

template <class T>
TORCHOPT_HD inline double square(T x) {
  const auto wide = static_cast<double>(widen(x));
  return ScalarLane<double>::mul(wide, wide);
}

}  // namespace
}  // namespace torchopt_ext

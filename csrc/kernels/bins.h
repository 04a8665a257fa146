// Bins that doubles of about the same size are added to without rounding. A bin is a biased sum
// whose last bit is its unit: adding to it rounds the addend to units, and the sum's change tells
// what was added (Demmel & Nguyen's and ReproBLAS' indexed sums).
#pragma once

#include <type_traits>

#include "kernels/dtype.h"

namespace torchopt_ext {
namespace {

TORCHOPT_HD inline int exponent_of(double x) {
  return static_cast<int>((bit_cast<uint64_t>(x) >> 52) & 0x7ff) - 1023;
}
TORCHOPT_HD inline double power_of_two(int exponent) {
  return bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Addends of a bin are below 2**40 of its units, and there are at most 4,096: their sum fits the 51
// bits that a sum biased by 1.5 * 2**52 units has room for, and what is left over is at most half a
// unit.
inline constexpr int kBinBits = 40;

// The unit of bin `bin`, for addends below 2**(exponent + 1), is 2 to the power of this.
TORCHOPT_HD inline int bin_unit(int exponent, int bin) {
  return exponent + 1 - kBinBits - (kBinBits + 1) * bin;
}
// What the sum of that bin starts from.
TORCHOPT_HD inline double bin_bias(int exponent, int bin) {
  return 1.5 * power_of_two(bin_unit(exponent, bin) + 52);
}
// A finite number of type T other than zero is a multiple of 2 to the power of this.
template <class T>
TORCHOPT_HD inline int last_bit_of(float x) {
  constexpr bool kHalf = std::is_same_v<T, Float16>;
  constexpr int kFractionBits = kHalf ? 10 : std::is_same_v<T, BFloat16> ? 7 : 23;
  constexpr int kSmallestExponent = kHalf ? -14 : -126;
  const int exponent = exponent_of(static_cast<double>(x));
  return (exponent < kSmallestExponent ? kSmallestExponent : exponent) - kFractionBits;
}

}  // namespace
}  // namespace torchopt_ext

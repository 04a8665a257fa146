// Bins, to which doubles of about the same size are added without rounding. A bin is a biased sum
// whose last bit is the bin's unit. An addition rounds the addend to units, and the change of the
// sum tells how much was added (the indexed sums of Demmel & Nguyen and of ReproBLAS).
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

// Addends of a bin are at most 2**40 of its units. A biased sum gets at most 1,024 addends (4,096
// elements in 4 lanes or more), so they add up to at most 2**50 units; a bias of 1.5 * 2**52 units
// leaves room for 2**51. The remainder of an addend is at most half a unit.
inline constexpr int kBinBits = 40;

// Returns the binary exponent of the unit of bin `bin`, for addends below 2**(exponent + 1).
TORCHOPT_HD inline int bin_unit(int exponent, int bin) {
  return exponent + 1 - kBinBits - (kBinBits + 1) * bin;
}
// Returns the value from which the sum of bin `bin` starts.
TORCHOPT_HD inline double bin_bias(int exponent, int bin) {
  return 1.5 * power_of_two(bin_unit(exponent, bin) + 52);
}
// Returns the binary exponent of the last bit of a finite, nonzero number of type T.
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

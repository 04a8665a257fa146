// Bins that doubles of about the same size are added to without rounding. A bin is a biased sum
// whose last bit is its unit: adding to it rounds the addend to units, and the sum's change tells
// what was added (Demmel & Nguyen's and ReproBLAS' indexed sums).
#pragma once

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

// What the sum of bin `bin` starts from, for addends below 2**(exponent + 1).
TORCHOPT_HD inline double bin_bias(int exponent, int bin) {
  return 1.5 * power_of_two(exponent + 1 - kBinBits - (kBinBits + 1) * bin + 52);
}

}  // namespace
}  // namespace torchopt_ext

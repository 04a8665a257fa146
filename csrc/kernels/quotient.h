// A quotient without a division: a division takes as long as ten other instructions, and is not
// pipelined. A float's bits, read as an integer, are about its logarithm. A constant minus them are
// those of a float near c / d (J. F. Blinn, "Floating-Point Tricks", 1997), whose product with d
// stays within 1.5 % of its mean, for every d. A parabola corrects it to a relative 8.4e-7: of all
// parabolas that of the Chebyshev polynomial T3 has the smallest error there.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

// By which 1/d differs from what the constants give.
inline constexpr float kQuotientScale = 0x1.5a1ce2p+1f;
// Its bits are the constant: those of 1.0 and of sqrt(1/2) together, so that guesses are from
// 0.7071 / d to 0.7286 / d. The guess for itself is 0, and so are the quotients. Larger divisors
// are taken for it.
inline constexpr float kLargestDivisor = 0x1.6a09e6p126f;

// What every quotient of a loop takes, in registers.
template <class L>
struct QuotientConstants {
  typename L::reg largest = L::held(kLargestDivisor);
  typename L::reg minus_largest = L::held(-kLargestDivisor);
  typename L::reg mean = L::held(0x1.13a592p+0f);  // 3/2 of the products' centre
  typename L::reg rest = L::held(0x1.8ba59p-2f);   // 3/4 of centre^2 - half width^2
};

// a - m / (kQuotientScale * d), of a normal d > 0. NaN if d is.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R minus_quotient(const QuotientConstants<L>& constants,
                                                           R a, R m, R d) {
  d = L::min(constants.largest, d);
  const R guess = L::sub_bits(constants.minus_largest, d);  // its negative
  const R from_mean = L::fma(d, guess, constants.mean);
  return L::fma(L::mul(m, guess), L::fma(from_mean, from_mean, constants.rest), a);
}

}  // namespace
}  // namespace torchopt_ext

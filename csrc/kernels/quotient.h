// A quotient without a division: a division takes as long as ten other instructions and is not
// pipelined. The bits of a float, read as an integer, approximate its logarithm. A constant minus
// the bits of d gives the bits of a float near c / d (J. F. Blinn, "Floating-Point Tricks", 1997).
// This float times d stays within 1.5 % of its mean for every d. A parabola corrects it to a
// relative 8.4e-7: the parabola of the Chebyshev polynomial T3, which of all parabolas has the
// smallest error there.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

// The ratio of 1 / d to the reciprocal of d that the constants give.
inline constexpr float kQuotientScale = 0x1.5a1ce2p+1f;
// The bits of this float are the constant of the subtraction: the bits of 1.0 plus the bits of
// sqrt(1/2), so that guesses lie between 0.7071 / d and 0.7286 / d. For this divisor the guess and
// the quotient are 0. Larger divisors are clamped to it.
inline constexpr float kLargestDivisor = 0x1.6a09e6p126f;

// The constants of every quotient in a loop, held in registers.
template <class L>
struct QuotientConstants {
  typename L::reg largest = L::set1_in_register(kLargestDivisor);
  typename L::reg minus_largest = L::set1_in_register(-kLargestDivisor);
  // The vertex of the parabola: 3/2 of the center of the products' range.
  typename L::reg vertex = L::set1_in_register(0x1.13a592p+0f);
  typename L::reg rest = L::set1_in_register(0x1.8ba59p-2f);  // 3/4 * (center^2 - half_width^2)
};

// Returns a - m / (kQuotientScale * d) for a normal d, and NaN if d is NaN. Only a positive d may
// be larger than kLargestDivisor, and none if not `clamps`.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R subtract_quotient(const QuotientConstants<L>& constants,
                                                              R a, R m, R d, bool clamps) {
  if (clamps) {
    d = L::min(constants.largest, d);
  }
  const R guess = L::sub_bits(constants.minus_largest, d);  // the negated guess
  const R from_vertex = L::fma(d, guess, constants.vertex);
  return L::fma(L::mul(m, guess), L::fma(from_vertex, from_vertex, constants.rest), a);
}

}  // namespace
}  // namespace torchopt_ext

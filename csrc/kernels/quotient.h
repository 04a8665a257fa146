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
// sqrt(1/2) times those of 1.0 twice, and a sign: guesses are from -0.7286 / d to -0.7071 / d.
TORCHOPT_HD inline float reciprocal_guess() { return bit_cast<float>(0xfeb504f3u); }
// As divisor and as guess it makes a quotient 0.
inline constexpr float kNoQuotient = 1.0f;

// What every quotient of a loop takes, in registers.
template <class L>
struct QuotientConstants {
  typename L::reg guess = L::held(reciprocal_guess());
  typename L::reg mean = L::held(0x1.13a592p+0f);  // 3/2 of the products' centre
  typename L::reg rest = L::held(0x1.8ba59p-2f);   // 3/4 of centre^2 - half width^2
};

// a - m / (kQuotientScale * d), of a normal d.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R minus_quotient(const QuotientConstants<L>& constants,
                                                           R a, R m, R d) {
  const R guess = L::sub_bits(constants.guess, d);
  const R from_mean = L::fma(d, guess, constants.mean);
  return L::fma(L::mul(m, guess), L::fma(from_mean, from_mean, constants.rest), a);
}

}  // namespace
}  // namespace torchopt_ext

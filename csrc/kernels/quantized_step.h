// Adam on a register of elements with 8-bit moments (quantize.h): docs/numerics.md section 11. A
// step has three parts: it averages the moments, updates and stores the weights, and encodes the
// moments when the scales of their group are known. Between the parts the loops keep the moments in
// registers or the first-level cache. Operations are fused only here: instructions, not memory,
// bound a step over so few bytes.
#pragma once

#include "kernels/adam_step.h"
#include "kernels/quantize.h"
#include "kernels/quotient.h"

namespace torchopt_ext {

template <class L>
using Moments = PerMoment<typename L::reg>;  // exp_avg and the root of exp_avg_sq

// The scalars of a tensor. Averaged moments are multiples of units in which gradients have weight
// 1; units, bias corrections and step size combine into one factor and eps. One product decodes and
// averages: the rounding that separate products avoid is far below the error of 8-bit moments.
struct QuantizedScalars {
  PerMoment<float> units;
  PerMoment<float> decoding;  // factors of the old moments, in addition to their scales
  float grad_factor, l2;
  float minus_decay;
  float to_divisor, eps;  // exp_avg's divisor in quotient.h's units: root * to_divisor + eps
  bool scales_gradients;  // multiplies gradients by grad_factor first
  bool has_l2, has_decay;
};

// The scalars, and registers of the scalars that every element uses.
template <class L>
struct QuantizedFactors {
  QuantizedScalars scalars;
  typename L::reg grad_factor = L::set1_in_register(scalars.grad_factor);
  typename L::reg l2 = L::set1_in_register(scalars.l2);
  typename L::reg minus_decay = L::set1_in_register(scalars.minus_decay);
  typename L::reg to_divisor = L::set1_in_register(scalars.to_divisor);
  typename L::reg eps = L::set1_in_register(scalars.eps);
  QuotientConstants<L> quotient{};
};

namespace {

TORCHOPT_HD inline QuantizedScalars quantized_scalars(const AdamScalars<float>& s) {
  using L = ScalarLane<float>;
  const float factor = s.maximize ? -s.grad_factor : s.grad_factor;
  // Units include the factor if it is positive and squares of gradients have about the range that
  // they would have after scaling. Otherwise clipping may be what makes the squares finite.
  const bool scales_gradients = s.has_l2 || !(factor >= 0x1p-16f && factor <= 1.0f);
  const float weight = scales_gradients ? 1.0f : factor;
  const PerMoment<float> units{L::mul(s.w1, weight), L::mul(L::sqrt(s.w2), weight)};
  const float per_unit = L::mul(L::mul(s.step_size, kQuotientScale), units.exp_avg);
  const float to_divisor = L::div(units.root, per_unit);
  // A step size of 0, or too small for divisors, gets the largest divisor.
  const bool divisor_fits = !(L::abs(to_divisor) >= 0x1p64f);  // true for a NaN
  return {.units = units,
          .decoding = {L::div(L::mul(s.beta1, kExpAvgCodeUnit), units.exp_avg),
                       L::div(L::sqrt(s.beta2), units.root)},
          .grad_factor = factor,
          .l2 = s.l2,
          .minus_decay = -s.decay,
          .to_divisor = divisor_fits ? to_divisor : 1.0f,
          .eps = divisor_fits ? L::div(s.eps_hat, per_unit) : kLargestDivisor,
          .scales_gradients = scales_gradients,
          .has_l2 = s.has_l2,
          .has_decay = s.has_decay};
}

// Returns the elements' moments after this step, in units. `group_decoding` has the factors of the
// codes of their group: its scales times QuantizedScalars::decoding.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline Moments<L> average_moments(
    const ElementsAt<L>& at, const QuantizedFactors<L>& f, const PerMoment<float>& group_decoding) {
  using R = typename L::reg;
  R g = at.gradient();
  if (f.scalars.scales_gradients) {
    g = L::mul(g, f.grad_factor);
    if (f.scalars.has_l2) {
      g = L::fma(f.l2, at.weight(), g);
    }
  }
  const R code = at.lane.load_code(at.template address<int8_t>(kExpAvg));
  const R root_code = at.lane.load_code(at.template address<uint8_t>(kExpAvgSq));
  const R before = L::mul(root_code, L::set1(group_decoding.root));
  return {L::fma(code, L::set1(group_decoding.exp_avg), g),
          L::sqrt(L::fma(before, before, L::mul(g, g)))};
}

// Returns the elements' weights after this step.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg updated_weights(
    const ElementsAt<L>& at, const QuantizedFactors<L>& f, const Moments<L>& moments) {
  using R = typename L::reg;
  R p = at.weight();
  if (f.scalars.has_decay) {
    p = L::fma(f.minus_decay, p, p);
  }
  const R divisor = L::fma(moments.root, f.to_divisor, f.eps);
  return L::canonical(subtract_quotient(f.quotient, p, moments.exp_avg, divisor));
}

// Returns random offsets for the codes, in place of dither.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg random_offset(const Random& random,
                                                                        Array array) {
  return L::add(L::fraction(random, array),
                L::set1(array == kExpAvg ? kExpAvgDitherStart : kRootDitherStart));
}

// Returns the codes of moments before they are rounded. `inverse` has the inverses of the scales;
// added(array) returns the dither or the random offsets.
template <class L, class Added>
[[gnu::always_inline]] TORCHOPT_HD inline Moments<L> encode_moments(const Moments<L>& moments,
                                                                    const PerMoment<float>& inverse,
                                                                    const Added& added) {
  return {L::fma(moments.exp_avg, L::set1(inverse.exp_avg), added(kExpAvg)),
          L::fma(moments.root, L::set1(inverse.root), added(kExpAvgSq))};
}

}  // namespace
}  // namespace torchopt_ext

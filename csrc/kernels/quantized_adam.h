// Adam on elements with 8-bit moments: docs/numerics.md section 11. Operations are fused only here:
// instructions, not memory, bound a step over so few bytes.
#pragma once

#include "kernels/adam.h"
#include "kernels/quantized_step.h"
#include "kernels/quotient.h"

namespace torchopt_ext {

// Averaged moments are multiples of units in which gradients have weight 1; units, bias corrections
// and step size combine into one factor and eps. One product decodes and averages: the rounding
// that separate products avoid is far below the error of 8-bit moments.
template <>
struct QuantizedScalars<Adam> {
  TORCHOPT_HD explicit QuantizedScalars(const Scalars<float>& s)
      : grad_factor(s.maximize ? -s.grad_factor : s.grad_factor),
        l2(s.l2),
        minus_decay(-s.decay),
        has_l2(s.has_l2),
        decay(!s.has_decay ? Decay::kNone
              : s.cautious ? Decay::kCautious
                           : Decay::kPlain) {
    using L = ScalarLane<float>;
    // Units include the factor if it is positive and squares of gradients have about the range that
    // they would have after scaling. Otherwise clipping may be what makes the squares finite.
    scales_gradients = has_l2 || !(grad_factor >= 0x1p-16f && grad_factor <= 1.0f);
    const float weight = scales_gradients ? 1.0f : grad_factor;
    const float exp_avg_unit = L::mul(s.value[Adam::kW1], weight);
    const float root_unit = L::mul(L::sqrt(s.value[Adam::kW2]), weight);
    units = {{exp_avg_unit, root_unit}};
    decoding = {{L::div(L::mul(s.value[Adam::kKeeps1], kCodeUnit), exp_avg_unit),
                 L::div(L::sqrt(s.value[Adam::kKeeps2]), root_unit)}};
    const float per_unit = L::mul(L::mul(s.step_size, kQuotientScale), exp_avg_unit);
    const float divisor_unit = L::div(root_unit, per_unit);
    // A step size of 0, or too small for divisors, gets the largest divisor.
    const bool divisor_fits = !(L::abs(divisor_unit) >= 0x1p64f);  // true for a NaN
    to_divisor = divisor_fits ? divisor_unit : 1.0f;
    eps = divisor_fits ? L::div(s.value[Adam::kEpsHat], per_unit) : kLargestDivisor;
  }

  PerMoment<Adam, float> units;
  PerMoment<Adam, float> decoding;
  float grad_factor, l2, minus_decay;
  float to_divisor, eps;  // exp_avg's divisor in quotient.h's units: root * to_divisor + eps
  bool scales_gradients;  // multiplies gradients by grad_factor first
  bool has_l2;
  // One number: GCC would keep a second flag in a mask register, which only a vector unit can test.
  enum class Decay : int32_t { kNone, kPlain, kCautious } decay;
};

// With the scalars that every element uses in registers.
template <class L>
struct QuantizedStep<Adam, L> {
  using R = typename L::reg;
  using Decay = QuantizedScalars<Adam>::Decay;

  TORCHOPT_HD explicit QuantizedStep(const QuantizedScalars<Adam>& scalars) : s(scalars) {}

  [[gnu::always_inline]] TORCHOPT_HD Moments<Adam, L> averaged(
      const ElementsAt<L>& at, const PerMoment<Adam, float>& group_decoding) const {
    R g = at.gradient();
    if (s.scales_gradients) {
      g = L::mul(g, grad_factor);
      if (s.has_l2) {
        g = L::fma(l2, at.weight(), g);
      }
    }
    const R code = at.lane.load_code(at.template address<int8_t>(state_array(Adam::kExpAvg)));
    const R root_code =
        at.lane.load_code(at.template address<uint8_t>(state_array(Adam::kExpAvgSq)));
    const R before = L::mul(root_code, L::set1(group_decoding.of[1]));
    return {{L::fma(code, L::set1(group_decoding.of[0]), g),
             L::sqrt(L::fma(before, before, L::mul(g, g)))}};
  }
  float largest_root() const {  // leaves room for roundings; a divisor of infinity is clamped
    if (!(s.to_divisor > 0.0f)) {
      return -1.0f;
    }
    return ScalarLane<float>::min(0x1p127f, (0x1p126f - s.eps) / s.to_divisor * 0.5f);
  }
  [[gnu::always_inline]] TORCHOPT_HD R weights(const ElementsAt<L>& at,
                                               const PerMoment<Adam, float>& /*group_decoding*/,
                                               const Moments<Adam, L>& moments,
                                               bool clamps = true) const {
    R p = at.weight();
    if (s.decay != Decay::kNone) {
      R factor = minus_decay;
      if (s.decay == Decay::kCautious) {
        factor = L::mul(factor, decays<L>(moments.of[0], p));
      }
      p = L::fma(factor, p, p);
    }
    const R divisor = L::fma(moments.of[1], to_divisor, eps);
    return L::canonical(subtract_quotient(quotient, p, moments.of[0], divisor, clamps));
  }

  QuantizedScalars<Adam> s;
  R grad_factor = L::set1_in_register(s.grad_factor);
  R l2 = L::set1_in_register(s.l2);
  R minus_decay = L::set1_in_register(s.minus_decay);
  R to_divisor = L::set1_in_register(s.to_divisor);
  R eps = L::set1_in_register(s.eps);
  QuotientConstants<L> quotient{};
};

}  // namespace torchopt_ext

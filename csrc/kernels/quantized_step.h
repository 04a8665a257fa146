// Adam on a register of elements with moments of 8 bits (quantize.h): docs/numerics.md section 11.
// In parts: moments are averaged, weights move by them and are stored, and moments are encoded when
// the scales of their group are known. Between the parts the loops keep them, in registers or the
// first-level cache. Operations are fused here alone: instructions, not memory, bound a step over
// so few bytes.
#pragma once

#include "kernels/adam_step.h"
#include "kernels/quantize.h"

namespace torchopt_ext {

template <class L>
using Moments = Each<typename L::reg>;  // of exp_avg_sq the root

// A tensor's scalars in registers. Decoding and averaging are one product: moments of 8 bits are
// far less exact than the rounding that separate ones would spare.
template <class L>
struct QuantizedFactors {
  using R = typename L::reg;
  R from_exp_avg, from_root;  // of the moments before, beside their scales
  R into_exp_avg, into_root;  // of gradients, with grad_factor where no weight decay is added
  R grad_factor, l2;          // of gradients to which it is added
  R minus_decay, eps_hat, minus_step_size;
  bool has_l2, has_decay;
  float scale_of_gradients;  // AdamScalars::grad_factor
};

namespace {

template <class L>
TORCHOPT_HD inline QuantizedFactors<L> quantized_factors(const AdamScalars<float>& s) {
  using One = ScalarLane<float>;
  const float factor = s.maximize ? -s.grad_factor : s.grad_factor;
  const float gradient_factor = s.has_l2 ? 1.0f : factor;
  return {.from_exp_avg = L::held(One::mul(s.beta1, kDecodedExpAvg)),
          .from_root = L::held(One::sqrt(s.beta2)),
          .into_exp_avg = L::held(One::mul(s.w1, gradient_factor)),
          .into_root = L::held(One::mul(One::sqrt(s.w2), gradient_factor)),
          .grad_factor = L::held(factor),
          .l2 = L::held(s.l2),
          .minus_decay = L::held(-s.decay),
          .eps_hat = L::held(s.eps_hat),
          .minus_step_size = L::held(-s.step_size),
          .has_l2 = s.has_l2,
          .has_decay = s.has_decay,
          .scale_of_gradients = s.grad_factor};
}

// What codes of a group are multiplied by.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline Moments<L> decoding_of(const QuantizedFactors<L>& f,
                                                                 const GroupScales& scales) {
  return {L::mul(L::set1(scales.exp_avg), f.from_exp_avg),
          L::mul(L::set1(scales.root), f.from_root)};
}

// The moments of elements [i, i + width) after this step.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline Moments<L> averaged(const L& lane,
                                                              const QuantizedFactors<L>& f,
                                                              const Layout& layout,
                                                              void* const (&x)[kArrays], int64_t i,
                                                              const Moments<L>& decoding) {
  using R = typename L::reg;
  R g = load_as(lane, layout.grad, x[kGrad], i);
  if (f.has_l2) {
    g = L::fma(f.l2, load_weight(lane, layout, x, i), L::mul(g, f.grad_factor));
  }
  const R code = lane.load_code(static_cast<const int8_t*>(x[kExpAvg]) + i);
  const R root_code = lane.load_code(static_cast<const uint8_t*>(x[kExpAvgSq]) + i);
  const R before = L::mul(root_code, decoding.root);
  const R now = L::mul(g, f.into_root);
  return {L::fma(g, f.into_exp_avg, L::mul(code, decoding.exp_avg)),
          L::sqrt(L::fma(before, before, L::mul(now, now)))};
}

// Their weights after this step.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg moved(
    const L& lane, const QuantizedFactors<L>& f, const Layout& layout, void* const (&x)[kArrays],
    int64_t i, const Moments<L>& moments) {
  using R = typename L::reg;
  const R u = L::div(moments.exp_avg, L::add(moments.root, f.eps_hat));
  R p = load_weight(lane, layout, x, i);
  if (f.has_decay) {
    p = L::fma(f.minus_decay, p, p);
  }
  return L::canonical(L::fma(f.minus_step_size, u, p));
}

// Stores them.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void store_moved(
    const L& lane, const QuantizedFactors<L>& f, const Layout& layout, const StepMode& mode,
    void* const (&x)[kArrays], int64_t i, typename L::reg p, const Random* random) {
  store_weight(lane, layout, mode, x, i, p, random);
  if (mode.write_back) {
    const typename L::reg g = load_as(lane, layout.grad, x[kGrad], i);
    store_as(lane, layout.grad, x[kGrad], i, scaled<L>(g, f.scale_of_gradients));
  }
}

// Random bits in place of dither.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg added_at_random(const Random& random,
                                                                          Array array) {
  return L::add(L::fraction(random, array), L::set1(array == kExpAvg ? kFromExpAvg : kFromRoot));
}

// Stores their moments, by the inverses of the scales. added(array): what is added to the codes.
template <class L, class Added>
[[gnu::always_inline]] TORCHOPT_HD inline void store_moments(const L& lane,
                                                             void* const (&x)[kArrays], int64_t i,
                                                             const Moments<L>& moments,
                                                             const GroupScales& inverse,
                                                             const Added& added) {
  lane.store_codes(static_cast<int8_t*>(x[kExpAvg]) + i,
                   L::fma(moments.exp_avg, L::set1(inverse.exp_avg), added(kExpAvg)));
  lane.store_codes(static_cast<uint8_t*>(x[kExpAvgSq]) + i,
                   L::fma(moments.root, L::set1(inverse.root), added(kExpAvgSq)));
}

}  // namespace
}  // namespace torchopt_ext

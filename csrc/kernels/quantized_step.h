// Adam on a register of elements with moments of 8 bits (quantize.h): docs/numerics.md section 11.
// In two parts, as a group's scales are known when all of it is updated; between them the loops
// keep the moments, in registers or the first-level cache.
#pragma once

#include "kernels/adam_step.h"
#include "kernels/quantize.h"

namespace torchopt_ext {

template <class L>
using Moments = Each<typename L::reg>;  // of exp_avg_sq the root

// Factors of moments and gradients. Decoding and averaging are one product: moments of 8 bits are
// far less exact than the rounding that separate ones would spare.
struct QuantizedScalars {
  float from_exp_avg, from_root;  // of the moments before, beside their scales
  float grad_factor;              // before weight decay is added to gradients
  float into_exp_avg, into_root;  // of gradients, those factors included if no decay is
};

namespace {

TORCHOPT_HD inline QuantizedScalars quantized_scalars(const AdamScalars<float>& s) {
  using L = ScalarLane<float>;
  const float factor = s.maximize ? -s.grad_factor : s.grad_factor;
  const float root_w2 = L::sqrt(s.w2);
  return {s.beta1, L::sqrt(s.beta2), factor, s.has_l2 ? s.w1 : L::mul(s.w1, factor),
          s.has_l2 ? root_w2 : L::mul(root_w2, factor)};
}

// By the scales of a group.
TORCHOPT_HD inline GroupScales decoding_of(const QuantizedScalars& q, const GroupScales& scales) {
  using L = ScalarLane<float>;
  return {L::mul(scales.exp_avg, q.from_exp_avg), L::mul(scales.root, q.from_root)};
}

// Updates and stores the weights of elements [i, i + width).
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline Moments<L> update_weights(
    const L& lane, const AdamScalars<float>& s, const QuantizedScalars& q, const Layout& layout,
    const StepMode& mode, void* const (&x)[kArrays], int64_t i, const GroupScales& decoding,
    const Random* random) {
  using R = typename L::reg;
  R p = load_weight(lane, layout, x, i);
  const R stored = load_as(lane, layout.grad, x[kGrad], i);
  R g = stored;
  if (s.has_l2) {
    g = L::add(L::mul(g, L::set1(q.grad_factor)), L::mul(L::set1(s.l2), p));
  }
  const R code = lane.load(static_cast<const int8_t*>(x[kExpAvg]) + i);
  const R root_code = lane.load_next(static_cast<const uint8_t*>(x[kExpAvgSq]) + i);
  const R m = L::add(L::mul(code, L::set1(decoding.exp_avg)), L::mul(g, L::set1(q.into_exp_avg)));
  const R before = L::mul(root_code, L::set1(decoding.root));
  const R now = L::mul(g, L::set1(q.into_root));
  const R root = L::sqrt(L::add(L::mul(before, before), L::mul(now, now)));
  move_weights<L>(s, p, m, root);
  store_weight(lane, layout, mode, x, i, p, random);
  if (mode.write_back) {
    store_as(lane, layout.grad, x[kGrad], i, scaled<L>(stored, s.grad_factor));
  }
  return {m, root};
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
                   L::add(L::mul(moments.exp_avg, L::set1(inverse.exp_avg)), added(kExpAvg)));
  lane.store_codes(static_cast<uint8_t*>(x[kExpAvgSq]) + i,
                   L::add(L::mul(moments.root, L::set1(inverse.root)), added(kExpAvgSq)));
}

}  // namespace
}  // namespace torchopt_ext

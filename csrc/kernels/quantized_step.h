// Adam on a register of elements with moments of 8 bits (quantize.h). In two parts, as a group's
// scales are known when all of it is updated; between them the moments are kept by the loops, in
// registers or the first-level cache.
#pragma once

#include "kernels/adam_step.h"
#include "kernels/quantize.h"

namespace torchopt_ext {

template <class L>
struct UpdatedMoments {
  typename L::reg exp_avg;
  typename L::reg root;  // of exp_avg_sq
};

namespace {

// Updates and stores the weights of elements [i, i + width).
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline UpdatedMoments<L> update_weights(
    const L& lane, const AdamScalars<float>& s, const Layout& layout, const StepMode& mode,
    void* const (&x)[kArrays], int64_t i, const GroupScales& scales, const Random* random) {
  using R = typename L::reg;
  R p = load_weight(lane, layout, x, i);
  const R g = load_as(lane, layout.grad, x[kGrad], i);
  R m = decoded_exp_avg<L>(lane.load(static_cast<const int8_t*>(x[kExpAvg]) + i), scales.exp_avg);
  R v =
      decoded_exp_avg_sq<L>(lane.load(static_cast<const uint8_t*>(x[kExpAvgSq]) + i), scales.root);
  R unused = L::set1(0);
  const R root = adam_registers<L, false>(s, p, g, m, v, unused, /*amsgrad=*/false);
  store_weight(lane, layout, mode, x, i, p, random);
  if (mode.write_back) {
    store_as(lane, layout.grad, x[kGrad], i, scaled<L>(g, s.grad_factor));
  }
  return {m, root};
}

// Stores their moments, by the inverses of the scales. `dither`: of the elements, unless their
// random bits take its place.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void store_moments(
    const L& lane, void* const (&x)[kArrays], int64_t i, const UpdatedMoments<L>& moments,
    const GroupScales& inverse, typename L::reg dither, const Random* random) {
  using R = typename L::reg;
  R exp_avg = exp_avg_code<L>(moments.exp_avg, inverse.exp_avg);
  R root = root_code<L>(moments.root, inverse.root);
  if (random != nullptr) {
    exp_avg = L::dithered(exp_avg, kLargestSigned, *random, kExpAvg);
    root = L::dithered(root, kLargestUnsigned, *random, kExpAvgSq);
  } else {
    root = L::add(root, dither);
  }
  lane.store_codes(static_cast<int8_t*>(x[kExpAvg]) + i, L::copy_sign(exp_avg, moments.exp_avg));
  lane.store_codes(static_cast<uint8_t*>(x[kExpAvgSq]) + i, root, moments.root);
}

}  // namespace
}  // namespace torchopt_ext

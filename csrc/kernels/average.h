// The moving average of a weight (EMA), for validation: average += weight * (value - average). CPUs
// average a chunk right after its update, while the caches hold the weights: 8 bytes of memory
// traffic for an fp32 average, where a pass of its own moves 12. docs/numerics.md section 13.
#pragma once

#include "kernels/step.h"

namespace torchopt_ext {
namespace {

// The weight of the new values, rounded once to the compute type T.
template <class T>
struct AverageScalars {
  TORCHOPT_HD explicit AverageScalars(double weight)
      : weight(static_cast<T>(weight)), keeps(static_cast<T>(1.0 - weight)) {}
  T weight;
  T keeps;
};

// Averages of bf16 are rounded at random: rounding to nearest would keep an average of decay 0.999
// where it is. Their draws have a seed of their own, so that they do not depend on the weight's.
TORCHOPT_HD inline bool rounds_average(const TensorWork& work) {
  return work.ema == DType::kBFloat16;
}
TORCHOPT_HD inline RoundingKey average_key(const StepOptions& options, const TensorWork& work) {
  RoundingKey key = rounding_key(options, work);
  key.seed ^= 0x6a09e667f3bcc908u;  // the fraction of the square root of 2
  return key;
}

// Averages one register of elements. `random` points to random bits if rounds_average().
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void average_elements(
    const ElementsAt<L>& at, DType ema, const AverageScalars<typename L::scalar>& s,
    const Random* random) {
  using T = typename L::scalar;
  const auto average = L::canonical(moving_average<L>(at.load(ema, kEma), at.weight(), s.weight,
                                                      s.keeps, s.weight < static_cast<T>(0.5)));
  if constexpr (L::has_narrow_types) {
    if (random != nullptr) {
      return at.lane.store_stochastic(at.template address<BFloat16>(kEma), average, *random,
                                      kParam);
    }
  }
  at.store(ema, kEma, average);
}

}  // namespace
}  // namespace torchopt_ext

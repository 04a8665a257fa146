// Learning-rate factor of the warmup-stable-decay family: docs/numerics.md section 5.
// Source of both generations: torchtitan/components/lr_scheduler.py.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

enum class DecayType : int32_t { kLinear, kSqrt, kCosine };

// The limit to which step counts are clamped. A schedule's control block holds them as doubles,
// which are exact up to this limit, and sums of clamped counts stay far from the end of int64_t.
inline constexpr int64_t kMostSteps = int64_t{1} << 53;

struct Schedule {
  int64_t warmup_steps;
  int64_t stable_steps;
  int64_t decay_steps;
  DecayType decay_type;
  double min_factor;
  int generation;  // 1: torchtitan before 0.1; 2: later
};

namespace {

// Clamps a count, which may be any double if it is a field of a control block; a NaN becomes 0.
// Integers above the limit convert to doubles that are not below it.
TORCHOPT_HD inline int64_t bounded_steps(double steps) {
  if (steps >= static_cast<double>(kMostSteps)) {
    return kMostSteps;
  }
  return steps > 0.0 ? static_cast<int64_t>(steps) : 0;
}

// Returns cos(pi * x) for x in [0, 1] without libm, whose results differ between hosts and CUDA.
TORCHOPT_HD inline double cospi(double x) {
  using L = ScalarLane<double>;
  constexpr double kPi = 3.141592653589793;
  const bool negative = x > 0.5;
  x = negative ? L::sub(1.0, x) : x;
  const bool use_cosine = x <= 0.25;
  const double y = L::mul(kPi, use_cosine ? x : L::sub(0.5, x));
  const double z = L::mul(y, y);
  // Taylor coefficients (-1)**k / (2k)! and (-1)**k / (2k + 1)!, highest first.
  constexpr double kCosine[] = {-1.0 / 6402373705728000.0,
                                1.0 / 20922789888000.0,
                                -1.0 / 87178291200.0,
                                1.0 / 479001600.0,
                                -1.0 / 3628800.0,
                                1.0 / 40320.0,
                                -1.0 / 720.0,
                                1.0 / 24.0,
                                -1.0 / 2.0,
                                1.0};
  constexpr double kSine[] = {-1.0 / 121645100408832000.0,
                              1.0 / 355687428096000.0,
                              -1.0 / 1307674368000.0,
                              1.0 / 6227020800.0,
                              -1.0 / 39916800.0,
                              1.0 / 362880.0,
                              -1.0 / 5040.0,
                              1.0 / 120.0,
                              -1.0 / 6.0,
                              1.0};
  double sum = use_cosine ? kCosine[0] : kSine[0];
  for (int k = 1; k < 10; ++k) {
    sum = L::add(L::mul(sum, z), use_cosine ? kCosine[k] : kSine[k]);
  }
  const double result = use_cosine ? sum : L::mul(y, sum);
  return negative ? -result : result;
}

// Returns the factor after `steps` steps, which are clamped by bounded_steps().
TORCHOPT_HD inline double lr_factor(const Schedule& schedule, double steps) {
  using L = ScalarLane<double>;
  const int64_t step = bounded_steps(steps);
  const auto next = static_cast<double>(step + 1);
  const int64_t before_decay = schedule.warmup_steps + schedule.stable_steps;
  const int64_t extra = schedule.generation == 1 ? 1 : 0;
  if (step < schedule.warmup_steps) {
    return L::div(next, static_cast<double>(schedule.warmup_steps + extra));
  }
  if (step < before_decay || schedule.decay_steps + extra == 0) {
    return 1.0;
  }
  double progress = L::div(static_cast<double>(step + 1 - before_decay),
                           static_cast<double>(schedule.decay_steps + extra));
  progress = progress < 1.0 ? progress : 1.0;
  double factor = 0.0;
  switch (schedule.decay_type) {
    case DecayType::kLinear:
      factor = L::sub(1.0, progress);
      break;
    case DecayType::kSqrt:
      factor = L::sub(1.0, L::sqrt(progress));
      break;
    case DecayType::kCosine:
      factor = L::mul(0.5, L::add(1.0, cospi(progress)));
      break;
  }
  return L::add(schedule.min_factor, L::mul(L::sub(1.0, schedule.min_factor), factor));
}

}  // namespace
}  // namespace torchopt_ext

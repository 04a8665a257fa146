// A step's decision between its passes (kernels/control.h) as CUDA kernels of one warp, and
// learning rates of a schedule.
#pragma once

#include "cuda/accumulator.h"
#include "cuda/launch.h"
#include "kernels/control.h"
#include "kernels/dtype.h"

namespace torchopt_ext {

// warp_total()'s.
using SharedLimbs = int64_t[ExactAccumulator::kSize];

// Normalizes the digits to below 2**32, so that ranks can add them as integers.
struct NormalizeKernel : KernelOf<kWarpThreads> {
  int64_t* accumulator;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    cta.each_warp([&](int, const auto& warp) {
      auto slots = load_slots(warp, accumulator);
      warp_normalize(warp, slots);
      each_slot(warp, slots, [&](int k, int64_t slot) { accumulator[k] = slot; });
    });
  }
};

struct TotalKernel : KernelOf<kWarpThreads> {
  using Shared = SharedLimbs;

  const int64_t* accumulator;
  double* total;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta, Shared& limbs) const {
    cta.each_warp([&](int, const auto& warp) {
      const double sum = warp_total(warp, accumulator, limbs);
      warp.leader([&] { *total = sum; });
    });
  }
};

struct ControlUpdateKernel : KernelOf<kWarpThreads> {
  using Shared = SharedLimbs;

  Control* control;
  const int64_t* accumulator;
  const float* grad_scale;
  const float* found_inf;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta, Shared& limbs) const {
    cta.each_warp([&](int, const auto& warp) {
      const double total = warp_total(warp, accumulator, limbs);
      warp.leader([&] { control_update(*control, total, grad_scale, found_inf); });
    });
  }
};

struct LossScaleUpdateKernel : KernelOf<1> {
  Control* control;
  const void* found_inf;  // one element
  DType found_inf_dtype;
  float* scale;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    cta.each([&](int) {
      scaler_update(*control, read_number(found_inf, found_inf_dtype) != 0.0, *scale);
    });
  }
};

struct LrFactorKernel : KernelOf<256> {
  Schedule schedule;
  const int64_t* steps;
  double* factors;
  int64_t n;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    cta.each([&](int thread) {
      const int64_t i = cta.block * cta.threads + thread;
      if (i < n) {
        factors[i] = lr_factor(schedule, static_cast<double>(steps[i]));
      }
    });
  }
};

}  // namespace torchopt_ext

// A step's decision between its passes (kernels/control.h) as bodies of CUDA kernels of one warp.
#pragma once

#include "cuda/accumulator.h"
#include "kernels/control.h"
#include "kernels/dtype.h"

namespace torchopt_ext {

// The shared memory of a kernel's warp.
using SharedLimbs = int64_t[ExactAccumulator::kSize];

namespace {

// Normalizes the digits to below 2**32, so that ranks can add them as integers.
template <class Warp>
TORCHOPT_HD inline void normalize_body(const Warp& warp, int64_t* accumulator) {
  WarpSlots<Warp> slots = load_slots(warp, accumulator);
  warp_normalize(warp, slots);
  each_slot(warp, slots, [&](int k, int64_t slot) { accumulator[k] = slot; });
}

template <class Warp>
TORCHOPT_HD inline void control_update_body(const Warp& warp, SharedLimbs& limbs, Control* control,
                                            const int64_t* accumulator, const float* grad_scale,
                                            const float* found_inf) {
  const double total = warp_total(warp, accumulator, limbs);
  warp.leader([&] { control_update(*control, total, grad_scale, found_inf); });
}

}  // namespace

void launch_normalize(int64_t* accumulator, CUstream_st* stream);
void launch_total(const int64_t* accumulator, double* total, CUstream_st* stream);
void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, CUstream_st* stream);
// `found_inf` is one element of fp32 or fp64.
void launch_loss_scale_update(Control* control, const void* found_inf, DType found_inf_dtype,
                              float* scale, CUstream_st* stream);
void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      CUstream_st* stream);

}  // namespace torchopt_ext

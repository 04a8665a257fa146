#include "cuda/control.h"

namespace torchopt_ext {
namespace {

__global__ void __launch_bounds__(kWarpThreads) normalize_kernel(int64_t* accumulator) {
  normalize_body(DeviceWarp{}, accumulator);
}

__global__ void __launch_bounds__(kWarpThreads)
    total_kernel(const int64_t* accumulator, double* total) {
  __shared__ SharedLimbs limbs;
  const double sum = warp_total(DeviceWarp{}, accumulator, limbs);
  DeviceWarp{}.leader([&] { *total = sum; });
}

__global__ void __launch_bounds__(kWarpThreads)
    control_update_kernel(Control* control, const int64_t* accumulator, const float* grad_scale,
                          const float* found_inf) {
  __shared__ SharedLimbs limbs;
  control_update_body(DeviceWarp{}, limbs, control, accumulator, grad_scale, found_inf);
}

__global__ void loss_scale_update_kernel(Control* control, const void* found_inf,
                                         DType found_inf_dtype, float* scale) {
  scaler_update(*control, read_number(found_inf, found_inf_dtype) != 0.0, *scale);
}

__global__ void lr_factor_kernel(Schedule schedule, const int64_t* steps, double* factors,
                                 int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) {
    factors[i] = lr_factor(schedule, steps[i]);
  }
}

}  // namespace

void launch_normalize(int64_t* accumulator, cudaStream_t stream) {
  normalize_kernel<<<1, kWarpThreads, 0, stream>>>(accumulator);
}

void launch_total(const int64_t* accumulator, double* total, cudaStream_t stream) {
  total_kernel<<<1, kWarpThreads, 0, stream>>>(accumulator, total);
}

void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream) {
  control_update_kernel<<<1, kWarpThreads, 0, stream>>>(control, accumulator, grad_scale,
                                                        found_inf);
}

void launch_loss_scale_update(Control* control, const void* found_inf, DType found_inf_dtype,
                              float* scale, cudaStream_t stream) {
  loss_scale_update_kernel<<<1, 1, 0, stream>>>(control, found_inf, found_inf_dtype, scale);
}

void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream) {
  constexpr int kThreads = 256;
  const auto grid = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  lr_factor_kernel<<<grid, kThreads, 0, stream>>>(schedule, steps, factors, n);
}

}  // namespace torchopt_ext

#include "cuda/launch.h"

namespace torchopt_ext {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum_of_squares_kernel(SumOfSquaresArgs args) {
  __shared__ CtaShared shared;
  DeviceCta cta(shared);
  sum_of_squares_body(cta, args);
}

// After the blocks' sums: digits below 2**32, so that ranks can add them as integers.
__global__ void accumulator_normalize_kernel(int64_t* accumulator) {
  accumulator_normalize(*reinterpret_cast<ExactAccumulator*>(accumulator));
}

__global__ void accumulator_total_kernel(const int64_t* accumulator, double* total) {
  *total = accumulator_total(*reinterpret_cast<const ExactAccumulator*>(accumulator));
}

__global__ void control_update_kernel(Control* control, const int64_t* accumulator,
                                      const float* grad_scale, const float* found_inf) {
  control_update(*control, *reinterpret_cast<const ExactAccumulator*>(accumulator), grad_scale,
                 found_inf);
}

__global__ void advance_steps_kernel(AdamArgs args) {
  advance_steps_body(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, args);
}

__global__ void __launch_bounds__(kThreads) adam_kernel(AdamArgs args) {
  __shared__ CtaShared shared;
  DeviceCta cta(shared);
  adam_body(cta, args);
}

__global__ void lr_factor_kernel(Schedule schedule, const int64_t* steps, double* factors,
                                 int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) {
    factors[i] = lr_factor(schedule, steps[i]);
  }
}

unsigned grid_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

void launch_sum_of_squares(const SumOfSquaresArgs& args, int64_t chunks, cudaStream_t stream) {
  sum_of_squares_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(args);
  accumulator_normalize_kernel<<<1, 1, 0, stream>>>(args.accumulator);
}

void launch_accumulator_total(const int64_t* accumulator, double* total, cudaStream_t stream) {
  accumulator_total_kernel<<<1, 1, 0, stream>>>(accumulator, total);
}

void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream) {
  control_update_kernel<<<1, 1, 0, stream>>>(control, accumulator, grad_scale, found_inf);
}

void launch_adam(const AdamArgs& args, int64_t chunks, cudaStream_t stream) {
  advance_steps_kernel<<<grid_for(args.tensor_count), kThreads, 0, stream>>>(args);
  if (chunks > 0) {
    adam_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(args);
  }
}

void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream) {
  lr_factor_kernel<<<grid_for(n), kThreads, 0, stream>>>(schedule, steps, factors, n);
}

}  // namespace torchopt_ext

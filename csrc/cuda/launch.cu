#include <algorithm>
#include <atomic>

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

__global__ void loss_scale_update_kernel(Control* control, const void* found_inf,
                                         DType found_inf_dtype, float* scale) {
  const bool overflow = found_inf_dtype == DType::kFloat64
                            ? *static_cast<const double*>(found_inf) != 0.0
                            : *static_cast<const float*>(found_inf) != 0.0f;
  scaler_update(*control, overflow, *scale);
}

__device__ int64_t grid_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__global__ void prepare_kernel(AdamArgs args) { prepare_body(grid_thread(), args); }

// 80 registers a thread leave three blocks on a multiprocessor, whose loads keep memory busy; what
// does not fit is invariant in the loop over elements.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) adam_kernel(AdamArgs args) {
  __shared__ CtaShared shared;
  DeviceCta cta(shared);
  adam_body<T>(cta, args);
}

template <class T>
__global__ void __launch_bounds__(kThreads) adam_traced_kernel(AdamArgs args) {
  __shared__ CtaShared shared;
  DeviceCta cta(shared);
  adam_traced_body<T>(cta, args);
}

__global__ void sum_traces_kernel(AdamArgs args) { sum_traces_body(grid_thread(), args); }

__global__ void __launch_bounds__(kThreads) scaled_copy_kernel(ScaledCopyArgs args) {
  __shared__ CtaShared shared;
  DeviceCta cta(shared);
  scaled_copy_body(cta, args);
}

__global__ void lr_factor_kernel(Schedule schedule, const int64_t* steps, double* factors,
                                 int64_t n) {
  const int64_t i = grid_thread();
  if (i < n) {
    factors[i] = lr_factor(schedule, steps[i]);
  }
}

// One thread for each item.
unsigned grid_for(int64_t items) {
  return static_cast<unsigned>((items + kThreads - 1) / kThreads);
}

// As many blocks as the current device runs at once, and no more than there are chunks, over which
// the blocks stride.
template <auto Kernel>
unsigned resident_grid(int64_t chunks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // the same whoever asks first
  int device = 0;
  cudaGetDevice(&device);
  int blocks = device < kDevices ? known[device].load() : 0;
  if (blocks == 0) {
    int processors = 1;
    int resident = 1;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, Kernel, kThreads, 0);
    blocks = std::max(1, processors * resident);
    if (device < kDevices) {
      known[device] = blocks;
    }
  }
  return static_cast<unsigned>(std::min<int64_t>(chunks, blocks));
}

}  // namespace

void launch_sum_of_squares(const SumOfSquaresArgs& args, cudaStream_t stream) {
  const unsigned grid = resident_grid<sum_of_squares_kernel>(args.chunk_count);
  sum_of_squares_kernel<<<grid, kThreads, 0, stream>>>(args);
}

void launch_accumulator_normalize(int64_t* accumulator, cudaStream_t stream) {
  accumulator_normalize_kernel<<<1, 1, 0, stream>>>(accumulator);
}

void launch_accumulator_total(const int64_t* accumulator, double* total, cudaStream_t stream) {
  accumulator_total_kernel<<<1, 1, 0, stream>>>(accumulator, total);
}

void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream) {
  control_update_kernel<<<1, 1, 0, stream>>>(control, accumulator, grad_scale, found_inf);
}

void launch_loss_scale_update(Control* control, const void* found_inf, DType found_inf_dtype,
                              float* scale, cudaStream_t stream) {
  loss_scale_update_kernel<<<1, 1, 0, stream>>>(control, found_inf, found_inf_dtype, scale);
}

void launch_prepare(const AdamArgs& args, cudaStream_t stream) {
  prepare_kernel<<<grid_for(args.tensor_count), kThreads, 0, stream>>>(args);
}

template <class T>
void launch_adam(const AdamArgs& args, cudaStream_t stream) {
  if (args.traces != nullptr) {
    const unsigned grid = resident_grid<adam_traced_kernel<T>>(args.chunk_count);
    adam_traced_kernel<T><<<grid, kThreads, 0, stream>>>(args);
  } else {
    const unsigned grid = resident_grid<adam_kernel<T>>(args.chunk_count);
    adam_kernel<T><<<grid, kThreads, 0, stream>>>(args);
  }
}
template void launch_adam<float>(const AdamArgs& args, cudaStream_t stream);
template void launch_adam<double>(const AdamArgs& args, cudaStream_t stream);

void launch_sum_traces(const AdamArgs& args, cudaStream_t stream) {
  sum_traces_kernel<<<grid_for(args.tensor_count), kThreads, 0, stream>>>(args);
}

void launch_scaled_copy(const ScaledCopyArgs& args, cudaStream_t stream) {
  const unsigned grid = resident_grid<scaled_copy_kernel>(args.chunk_count);
  scaled_copy_kernel<<<grid, kThreads, 0, stream>>>(args);
}

void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream) {
  lr_factor_kernel<<<grid_for(n), kThreads, 0, stream>>>(schedule, steps, factors, n);
}

}  // namespace torchopt_ext

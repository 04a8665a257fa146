// The kernels of every pass except pass B (pass_b.cu, traced.cu), and their launchers.
#include <algorithm>

#include "cuda/control.h"
#include "cuda/copy.h"
#include "cuda/digest.h"
#include "cuda/norm.h"

namespace torchopt_ext {
namespace {

// Blocks on a multiprocessor: three have 48 KB of loads in flight, twice what keeps memory busy.
constexpr int kBlocksPerMultiprocessor = 3;

template <int kTensors>
__global__ void __launch_bounds__(kNormThreads, kBlocksPerMultiprocessor)
    norm_kernel(NormArgs args, const __grid_constant__ GradientsOf<kTensors> gradients) {
  __shared__ NormShared shared;
  norm_body(DeviceCta{}, shared, args, gradients);
}

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

__global__ void __launch_bounds__(kCopyThreads, 5) copy_kernel(CopyArgs args) {
  copy_body(DeviceCta{}, args);
}

__global__ void __launch_bounds__(kDigestBlock) digest_kernel(DigestArgs args) {
  digest_body(DeviceCta{}, args);
}

}  // namespace

// Launches at most as many blocks as the device runs at once, because each block ends with atomics.
template <int kTensors>
void launch_norm(const NormArgs& args, const GradientsOf<kTensors>& gradients, int multiprocessors,
                 cudaStream_t stream) {
  const int64_t blocks = (args.chunk_count + kNormWarps - 1) / kNormWarps;
  const auto grid = static_cast<unsigned>(
      std::min<int64_t>(blocks, int64_t{kBlocksPerMultiprocessor} * multiprocessors));
  norm_kernel<<<grid, kNormThreads, 0, stream>>>(args, gradients);
}
template void launch_norm(const NormArgs&, const Gradients&, int, cudaStream_t);
template void launch_norm(const NormArgs&, const SomeGradients&, int, cudaStream_t);
template void launch_norm(const NormArgs&, const FewGradients&, int, cudaStream_t);

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

void launch_copy(const CopyArgs& args, int64_t chunk_count, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(chunk_count), kCopyThreads, 0, stream>>>(args);
}

void launch_digest(const DigestArgs& args, cudaStream_t stream) {
  constexpr int64_t kWarps = kDigestBlock / kWarpThreads;
  const auto grid = static_cast<unsigned>((args.chunk_count + kWarps - 1) / kWarps);
  digest_kernel<<<grid, kDigestBlock, 0, stream>>>(args);
}

}  // namespace torchopt_ext

#include <utility>

#include "cuda/adam_quantized.h"

namespace torchopt_ext {
namespace {

__global__ void __launch_bounds__(kAdamThreads)
    prepare_kernel(AdamArgs args, const __grid_constant__ Gradients gradients,
                   const __grid_constant__ Groups groups) {
  prepare_body(static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), args, gradients, groups);
}

// Three blocks on a multiprocessor, whose threads have 64 to 112 bytes of loads under way, keep
// memory busy; two are what fp64 and 8-bit moments have registers for.
constexpr int blocks_of(AdamKind kind) {
  return kind == AdamKind::kFloat64 || is_quantized(kind) ? 2 : 3;
}

template <AdamKind kKind>
__global__ void __launch_bounds__(kAdamThreads, blocks_of(kKind)) adam_kernel(AdamArgs args) {
  pass_b_body<kKind>(DeviceCta{}, args);
}

struct Kernels {
  void (*of[kAdamKinds])(AdamArgs);
};
template <int... kKinds>
constexpr Kernels kernels(std::integer_sequence<int, kKinds...>) {
  return {{adam_kernel<AdamKind{kKinds}>...}};
}

}  // namespace

void launch_prepare(const AdamArgs& args, const Gradients& gradients, const Groups& groups,
                    cudaStream_t stream) {
  const auto grid = static_cast<unsigned>((gradients.count + kAdamThreads - 1) / kAdamThreads);
  prepare_kernel<<<grid, kAdamThreads, 0, stream>>>(args, gradients, groups);
}

void launch_adam(AdamKind kind, const AdamArgs& args, int64_t chunk_count, cudaStream_t stream) {
  static constexpr Kernels kKernels = kernels(std::make_integer_sequence<int, kAdamKinds>{});
  kKernels
      .of[static_cast<int>(kind)]<<<static_cast<unsigned>(chunk_count), kAdamThreads, 0, stream>>>(
          args);
}

}  // namespace torchopt_ext

#include "cuda/adam_traced.h"

namespace torchopt_ext {
namespace {

template <TracedKind kKind>
__global__ void __launch_bounds__(kAdamThreads, kKind == TracedKind::kQuantized ? 1 : 2)
    adam_traced_kernel(AdamArgs args, TraceArgs traces) {
  __shared__ TraceShared shared;
  adam_traced_body<kKind>(DeviceCta{}, shared, args, traces);
}

}  // namespace

void launch_adam_traced(TracedKind kind, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, cudaStream_t stream) {
  using Kernel = void (*)(AdamArgs, TraceArgs);
  constexpr Kernel kKernels[kTracedKinds] = {
      // in the order of TracedKind
      adam_traced_kernel<TracedKind::kFloat32>, adam_traced_kernel<TracedKind::kFloat64>,
      adam_traced_kernel<TracedKind::kQuantized>};
  kKernels[static_cast<int>(kind)]<<<static_cast<unsigned>(chunk_count), kAdamThreads, 0, stream>>>(
      args, traces);
}

}  // namespace torchopt_ext

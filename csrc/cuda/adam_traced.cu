#include "cuda/adam_traced.h"

namespace torchopt_ext {
namespace {

template <TracedKind kKind>
__global__ void __launch_bounds__(kAdamThreads, kKind == TracedKind::kQuantized ? 1 : 2)
    adam_traced_kernel(AdamArgs args, TraceArgs traces) {
  __shared__ TraceShared shared;
  adam_traced_body<kKind>(DeviceCta{}, shared, args, traces);
}

__global__ void __launch_bounds__(kWarpThreads)
    sum_traces_kernel(int64_t chunk_count, AdamArgs args, TraceArgs traces) {
  __shared__ SharedTraces shared;
  sum_traces_body(DeviceWarp{}, shared, blockIdx.x, chunk_count, args, traces);
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

void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(tensor_count);
  sum_traces_kernel<<<grid, kWarpThreads, 0, stream>>>(chunk_count, args, traces);
}

}  // namespace torchopt_ext

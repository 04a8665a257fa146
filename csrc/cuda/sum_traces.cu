#include "cuda/sum_traces.h"

namespace torchopt_ext {
namespace {

__global__ void __launch_bounds__(kWarpThreads)
    sum_traces_kernel(int64_t chunk_count, AdamArgs args, TraceArgs traces) {
  __shared__ SharedTraces shared;
  sum_traces_body(DeviceWarp{}, shared, blockIdx.x, chunk_count, args, traces);
}

}  // namespace

void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(tensor_count);
  sum_traces_kernel<<<grid, kWarpThreads, 0, stream>>>(chunk_count, args, traces);
}

}  // namespace torchopt_ext

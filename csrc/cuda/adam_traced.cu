#include "cuda/adam_traced.h"

namespace torchopt_ext {
namespace {

template <class T>
__global__ void __launch_bounds__(kAdamThreads, 2)
    adam_traced_kernel(AdamArgs args, TraceArgs traces) {
  __shared__ TraceShared shared;
  adam_traced_body<T>(DeviceCta{}, shared, args, traces);
}

__global__ void __launch_bounds__(kAdamThreads)
    sum_traces_kernel(int64_t tensor_count, int64_t chunk_count, AdamArgs args, TraceArgs traces) {
  sum_traces_body(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, tensor_count,
                  chunk_count, args, traces);
}

}  // namespace

void launch_adam_traced(bool is_double, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, cudaStream_t stream) {
  const auto kernel = is_double ? adam_traced_kernel<double> : adam_traced_kernel<float>;
  kernel<<<static_cast<unsigned>(chunk_count), kAdamThreads, 0, stream>>>(args, traces);
}

void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>((tensor_count + kAdamThreads - 1) / kAdamThreads);
  sum_traces_kernel<<<grid, kAdamThreads, 0, stream>>>(tensor_count, chunk_count, args, traces);
}

}  // namespace torchopt_ext

#include <algorithm>

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
template void launch_norm(const NormArgs&, const FewGradients&, int, cudaStream_t);

}  // namespace torchopt_ext

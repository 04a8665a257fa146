#include "cuda/copy.h"

namespace torchopt_ext {
namespace {

__global__ void __launch_bounds__(kCopyThreads, 5) copy_kernel(CopyArgs args) {
  copy_body(DeviceCta{}, args);
}

}  // namespace

void launch_copy(const CopyArgs& args, int64_t chunk_count, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(chunk_count), kCopyThreads, 0, stream>>>(args);
}

}  // namespace torchopt_ext

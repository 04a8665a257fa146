#include "cuda/pass_b.h"

namespace torchopt_ext {
namespace {

template <int kTensors>
__global__ void __launch_bounds__(kUpdateThreads)
    prepare_kernel(UpdateArgs args, const __grid_constant__ GradientsOf<kTensors> gradients,
                   const __grid_constant__ ParamGroups groups) {
  prepare_body(static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), args, gradients, groups);
}

// Blocks on a multiprocessor: four where registers suffice, with 64 to 112 bytes of loads in flight
// in each thread. On an H100 four blocks took a tenth less time than three over 2,000 tensors of
// 1,000, and 2 % less over large tensors in chunks of one or two iterations of a block
// (passes.cpp). With 8-bit moments three took 3 % (fp32), 13 % (bf16), 14 % (stochastic) and 13 %
// (8-bit remainders, although they spill 6 registers) less than two.
// A number for the kind: nvcc cannot name values of an enumeration without enumerators.
template <int kKind>
__global__ void __launch_bounds__(kUpdateThreads, kTraits<Kind{kKind}>.blocks)
    update_kernel(UpdateArgs args) {
  pass_b_body<Kind{kKind}>(DeviceCta{}, args);
}

}  // namespace

template <int kTensors>
void launch_prepare(const UpdateArgs& args, const GradientsOf<kTensors>& gradients,
                    const ParamGroups& groups, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>((gradients.count + kUpdateThreads - 1) / kUpdateThreads);
  prepare_kernel<<<grid, kUpdateThreads, 0, stream>>>(args, gradients, groups);
}
template void launch_prepare(const UpdateArgs&, const Gradients&, const ParamGroups&, cudaStream_t);
template void launch_prepare(const UpdateArgs&, const SomeGradients&, const ParamGroups&,
                             cudaStream_t);
template void launch_prepare(const UpdateArgs&, const FewGradients&, const ParamGroups&,
                             cudaStream_t);

void launch_update(Kind kind, const UpdateArgs& args, int64_t chunk_count, cudaStream_t stream) {
  with_kind(kind, [&](auto constant) {
    update_kernel<static_cast<int>(constant())>
        <<<static_cast<unsigned>(chunk_count), kUpdateThreads, 0, stream>>>(args);
  });
}

}  // namespace torchopt_ext

// Launches of kernels. A kernel is a struct of its arguments, one parameter in constant memory. It
// has an operator(), its body, a template over the block (cta.h). `Shared`, if it has one, is the
// memory that a block shares, the body's second argument.
#pragma once

#include "cuda/cta.h"

namespace torchopt_ext {

// The threads of a block, and the least number of blocks on a multiprocessor for which the compiler
// saves registers (0: none).
template <int kBlockThreads, int kLeastBlocks = 0>
struct KernelOf {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kBlocks = kLeastBlocks;
};

template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, CUstream_st* stream);

#ifdef __CUDACC__  // instantiated in passes.cu, pass_b.cu and traced.cu

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    run(const __grid_constant__ Kernel kernel) {
  if constexpr (requires { typename Kernel::Shared; }) {
    __shared__ typename Kernel::Shared shared;
    kernel(DeviceCta{}, shared);
  } else {
    kernel(DeviceCta{});
  }
}
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, CUstream_st* stream) {
  run<<<static_cast<unsigned>(blocks), Kernel::kThreads, 0, stream>>>(kernel);
}

#endif

}  // namespace torchopt_ext

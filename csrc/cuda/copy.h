// The scaled copy as a CUDA kernel.
#pragma once

#include "cuda/launch.h"
#include "cuda/vector_lane.h"
#include "kernels/control.h"
#include "kernels/step.h"
#include "work/work_list.h"

namespace torchopt_ext {

namespace {

// Copies a chunk; each thread copies 16 bytes or more at once. T is double for fp64, which converts
// to and from no other type, and float for all other types.
template <class T, int kWidth, class Cta>
TORCHOPT_HD inline void copy_chunk(const Cta& cta, const TensorWork& work, const Chunk& chunk,
                                   T factor) {
  void* x[kArrays] = {};
  for (const int array : {kParam, kGrad}) {
    x[array] = element(work, array, chunk.begin);
  }
  const Layout layout = work.layout;
  const int n = chunk.count;
  const auto copy = [&](const auto& lane, int i) {
    using L = std::decay_t<decltype(lane)>;
    const ElementsAt<L> at{lane, layout, x, i};
    at.store(layout.param, kParam, scaled<L>(at.gradient(), factor));
  };
  const AlignedRange registers = aligned_registers(layout, x, kWidth, n);
  cta.each([&](int thread) {
    for_each_register(
        registers, kWidth, n, thread, cta.threads, [&](int i) { copy(VectorLane<T, kWidth>{}, i); },
        [&](int i) { copy(VectorLane<T, 1>{}, i); });
  });
}

}  // namespace

// Pointers are to device memory.
struct CopyKernel : KernelOf<256, 5> {
  const TensorWork* tensors;
  const Chunk* chunks;  // one for each block
  const Control* control;
  bool unscale;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    const Chunk chunk = chunks[cta.block];
    const TensorWork& work = tensors[chunk.tensor];
    const double factor = unscale ? control->grad_factor : 1.0;
    if (control->skip != 0.0 ||
        is_noop_copy(work.memory[kParam], work.memory[kGrad], work.layout.param, factor)) {
      return;
    }
    if (work.layout.param == DType::kFloat64) {
      copy_chunk<double, 2>(cta, work, chunk, factor);
    } else {
      copy_chunk<float, 8>(cta, work, chunk, static_cast<float>(factor));
    }
  }
};

}  // namespace torchopt_ext

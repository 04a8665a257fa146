// The scaled copy as the body of a CUDA kernel, a template over the block of threads (cta.h). Free
// of torch.
#pragma once

#include "cuda/array.h"
#include "cuda/cta.h"
#include "kernels/scaled_copy.h"

namespace torchopt_ext {

// All in device memory.
struct ScaledCopyArgs {
  const TensorWork* tensors;
  const Chunk* chunks;
  const Control* control;
  int64_t chunk_count;
  bool unscale;
};

namespace {

// Elements [i, i + Width).
template <class T, int Width>
TORCHOPT_HD inline void copy_group(const TensorWork& work, const DeviceArray& to,
                                   const DeviceArray& from, T factor, int64_t i) {
  T x[Width];
  decode(load<T, Width>(from, i), work.layout.grad, x);
  for (int k = 0; k < Width; ++k) {
    x[k] = scaled<ScalarLane<T>>(x[k], factor);
  }
  store(to, i, encode(x, work.layout.param));
}

// A thread's share of a chunk, Width elements at a time.
template <class T, int Width>
TORCHOPT_HD inline void copy_chunk(const TensorWork& work, const Chunk& chunk, T factor, int thread,
                                   int threads) {
  DeviceArray to = array_of(work.memory[kParam], element_size(work.layout.param));
  DeviceArray from = array_of(work.memory[kGrad], element_size(work.layout.grad));
  const VectorRange range =
      vector_range({address_of(to, chunk.begin), address_of(from, chunk.begin)},
                   {to.size, from.size}, Width, chunk.begin, chunk.end);
  to.aligned = is_aligned(address_of(to, range.begin), int64_t{Width} * to.size);
  from.aligned = is_aligned(address_of(from, range.begin), int64_t{Width} * from.size);
  for_each_access(
      range, Width, chunk.begin, chunk.end, thread, threads,
      [&](int64_t i) { copy_group<T, Width>(work, to, from, factor, i); },
      [&](int64_t i) { copy_group<T, 1>(work, to, from, factor, i); });
}

// A thread's group is 16 bytes of the wider of the two types.
template <class Cta>
TORCHOPT_HD inline void scaled_copy_body(Cta& cta, const ScaledCopyArgs& args) {
  if (args.control->skip != 0.0) {
    return;
  }
  const double factor = args.unscale ? args.control->grad_factor : 1.0;
  cta.each([&](int thread) {
    for (int64_t c = cta.block; c < args.chunk_count; c += cta.blocks) {
      const Chunk chunk = args.chunks[c];
      const TensorWork work = args.tensors[chunk.tensor];
      const auto single = static_cast<float>(factor);
      if (is_idle_copy(work.memory[kParam], work.memory[kGrad], work.layout.param, factor)) {
        continue;
      }
      if (work.layout.param == DType::kFloat64) {
        copy_chunk<double, 2>(work, chunk, factor, thread, cta.threads);
      } else if (work.layout.param == DType::kFloat32 || work.layout.grad == DType::kFloat32) {
        copy_chunk<float, 4>(work, chunk, single, thread, cta.threads);
      } else {
        copy_chunk<float, 8>(work, chunk, single, thread, cta.threads);
      }
    }
  });
}

}  // namespace
}  // namespace torchopt_ext

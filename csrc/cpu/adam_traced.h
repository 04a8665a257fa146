// Tracking on the CPU (kernels/trace.h): pass B on a chunk, with what it saw of it.
#pragma once

#include "cpu/kernel_table.h"
#include "kernels/quantize.h"

namespace torchopt_ext {

// Norms find a tile's values in the first-level cache.
inline constexpr int64_t kTileElements = 512;

inline const char* element(const TensorWork& work, int array, int64_t i) {
  return static_cast<const char*>(work.memory[array]) + i * element_size(work.layout, array);
}

inline ChunkTrace adam_traced(const KernelTable& table, const TensorScalars& scalars,
                              const TensorWork& work, const StepOptions& options, int64_t begin,
                              int64_t end, bool past_caches) {
  const auto step = table.adam_traced[static_cast<int>(work.kind)];
  ChunkTrace trace{};
  if ((options.track & (kTrackNorms | kTrackLost)) == 0) {
    step(scalars, work, options, begin, end, past_caches, nullptr, trace);
    return trace;
  }
  const auto sum_of_squares = [&](DType dtype, const void* x, int64_t n) {
    return table.block_sum[static_cast<int>(dtype)](x, n);
  };
  const bool norms = (options.track & kTrackNorms) != 0;
  const bool is_double = work.layout.param == DType::kFloat64;
  for (int64_t i = begin; i < end;) {
    const int64_t tile_end = is_quantized(work.kind)   ? end_of_groups(work, begin, end, i)
                             : end - i < kTileElements ? end
                                                       : i + kTileElements;
    const int64_t n = tile_end - i;
    if (norms) {  // before the gradient may be written
      trace.grad_sumsq += sum_of_squares(work.layout.grad, element(work, kGrad, i), n);
    }
    alignas(64) double change[kTileElements];
    step(scalars, work, options, i, tile_end, past_caches, change, trace);
    if (norms) {
      trace.update_sumsq +=
          sum_of_squares(is_double ? DType::kFloat64 : DType::kFloat32, change, n);
    }
    i = tile_end;
  }
  return tracked(trace, options.track);
}

}  // namespace torchopt_ext

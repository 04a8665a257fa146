// Tracking on the CPU (kernels/trace.h): runs pass B on a chunk and returns the chunk's trace.
#pragma once

#include "cpu/kernel_table.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// Returns the end of the tile that begins at element i of chunk [begin, end).
inline int64_t end_of_tile(const TensorWork& work, int64_t begin, int64_t end, int64_t i) {
  if (is_quantized(work.kind)) {
    const ChunkGroups groups(work, end - begin);
    const int next = groups.of(static_cast<int>(i - begin)) + kTileGroups;
    return next < groups.count() ? begin + groups.begin(next) : end;
  }
  return end - i < kTileElements ? end : i + kTileElements;
}

inline ChunkTrace traced_update(const KernelTable& table, const TensorScalars& scalars,
                                const TensorWork& work, const StepOptions& options, int64_t begin,
                                int64_t end) {
  ChunkTrace trace{};
  const auto sum_of_squares = [&](DType dtype, const void* x, int64_t n) {
    return table.block_sum[static_cast<int>(dtype)](x, n);
  };
  const int kind = static_cast<int>(work.kind);
  const bool norms = (options.track & kTrackNorms) != 0;
  const bool is_double = work.layout.param == DType::kFloat64;
  for (int64_t i = begin; i < end;) {
    const int64_t tile_end = end_of_tile(work, begin, end, i);
    const int64_t n = tile_end - i;
    if (norms) {  // before the step may overwrite the gradient
      trace.grad_sumsq += sum_of_squares(work.layout.grad, element(work, kGrad, i), n);
    }
    alignas(64) double change[kTileElements];
    trace.lost += table.update[kind](scalars, work, options, i, tile_end, change);
    if (norms) {
      trace.update_sumsq +=
          sum_of_squares(is_double ? DType::kFloat64 : DType::kFloat32, change, n);
    }
    i = tile_end;
  }
  return tracked(trace, options.track);
}

}  // namespace
}  // namespace torchopt_ext

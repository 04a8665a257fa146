// Tracking on the CPU (kernels/trace.h): runs pass B on a chunk and returns the chunk's trace.
#pragma once

#include "cpu/digest_sums.h"
#include "cpu/kernel_table.h"

namespace torchopt_ext {
namespace {

inline constexpr int64_t kDigestTileBytes = 2048;  // of each moment, if only the digest is tracked

// Returns the end of the tile that begins at element i of chunk [begin, end). `changes`: whether
// norms or lost updates are tracked.
inline int64_t end_of_tile(const TensorWork& work, bool changes, int64_t begin, int64_t end,
                           int64_t i) {
  if (is_quantized(work.kind)) {
    // The kernel for 8-bit moments prepares constants in each call. If only the digest is tracked,
    // the tile is therefore the whole chunk, which the L2 cache holds.
    if (!changes) {
      return end;
    }
    const ChunkGroups groups(work, end - begin);
    const int next = groups.of(static_cast<int>(i - begin)) + kTileGroups;
    return next < groups.count() ? begin + groups.begin(next) : end;
  }
  const int64_t longest =
      changes ? kTileElements : kDigestTileBytes / element_size(work.layout.state);
  return end - i < longest ? end : i + longest;
}

// W has the digest's operations on 32-bit words.
template <class W>
ChunkTrace adam_traced(const KernelTable& table, const TensorScalars& scalars,
                       const TensorWork& work, const StepOptions& options, int64_t begin,
                       int64_t end) {
  ChunkTrace trace{};
  ChunkDigest<W> digest(work);
  const auto sum_of_squares = [&](DType dtype, const void* x, int64_t n) {
    return table.block_sum[static_cast<int>(dtype)](x, n);
  };
  const int kind = static_cast<int>(work.kind);
  const bool norms = (options.track & kTrackNorms) != 0;
  const bool changes = norms || (options.track & kTrackLost) != 0;
  const bool is_double = work.layout.param == DType::kFloat64;
  for (int64_t i = begin; i < end;) {
    const int64_t tile_end = end_of_tile(work, changes, begin, end, i);
    const int64_t n = tile_end - i;
    if (norms) {  // before the step may overwrite the gradient
      trace.grad_sumsq += sum_of_squares(work.layout.grad, element(work, kGrad, i), n);
    }
    alignas(64) double change[kTileElements];
    trace.lost += table.adam[kind](scalars, work, options, i, tile_end, changes ? change : nullptr);
    if (norms) {
      trace.update_sumsq +=
          sum_of_squares(is_double ? DType::kFloat64 : DType::kFloat32, change, n);
    }
    if ((options.track & kTrackDigest) != 0) {
      digest.add(i, tile_end);
    }
    i = tile_end;
  }
  trace.digest = digest.total();
  return tracked(trace, options.track);
}

}  // namespace
}  // namespace torchopt_ext

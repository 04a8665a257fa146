// Tracking on the CPU (kernels/trace.h): pass B on a chunk, with what it saw of it.
#pragma once

#include "cpu/kernel_table.h"
#include "kernels/quantize.h"

namespace torchopt_ext {

// Norms and the digest find a tile in the first cache. Norms are summed by tiles, so that their
// bits depend on its length.
inline constexpr int64_t kTileElements = 512;
inline constexpr int64_t kDigestTileBytes = 2048;  // of each moment, where only the digest is taken

// Where the tile from element i of chunk [begin, end) on ends; `changes`: whether norms or lost
// updates are noted.
inline int64_t end_of_tile(const TensorWork& work, bool changes, int64_t begin, int64_t end,
                           int64_t i) {
  if (is_quantized(work.kind)) {
    // Their kernel prepares constants in each call: a digest alone takes whole chunks, which the
    // second cache holds.
    return changes ? end_of_groups(work, begin, end, i) : end;
  }
  const int64_t longest =
      changes ? kTileElements : kDigestTileBytes / element_size(work.layout.state);
  return end - i < longest ? end : i + longest;
}

inline const char* element(const TensorWork& work, int array, int64_t i) {
  return static_cast<const char*>(work.memory[array]) + i * element_size(work.layout, array);
}

inline ChunkTrace adam_traced(const KernelTable& table, const TensorScalars& scalars,
                              const TensorWork& work, const StepOptions& options, int64_t begin,
                              int64_t end, bool past_caches) {
  ChunkTrace trace{};
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
    if (norms) {  // before the gradient may be written
      trace.grad_sumsq += sum_of_squares(work.layout.grad, element(work, kGrad, i), n);
    }
    if (changes) {
      alignas(64) double change[kTileElements];
      trace.lost +=
          table.adam_traced[kind](scalars, work, options, i, tile_end, past_caches, change);
      if (norms) {
        trace.update_sumsq +=
            sum_of_squares(is_double ? DType::kFloat64 : DType::kFloat32, change, n);
      }
    } else {
      table.adam[kind](scalars, work, options, i, tile_end, past_caches);
    }
    if ((options.track & kTrackDigest) != 0) {
      trace.digest += table.digest(work, i, tile_end);
    }
    i = tile_end;
  }
  return tracked(trace, options.track);
}

}  // namespace torchopt_ext

// Tracking on the CPU (kernels/trace.h): pass B on a chunk, tile by tile, so that norms and digest
// find its values in the first-level cache.
#pragma once

#include "cpu/kernel_table.h"
#include "kernels/digest.h"
#include "kernels/trace.h"

namespace torchopt_ext {

inline const char* element(const TensorWork& work, int array, int64_t i) {
  return static_cast<const char*>(work.memory[array]) + i * element_size(work.layout, array);
}

// Of all that a step stores of elements [begin, end).
inline uint64_t digest_of(const KernelTable& table, const TensorWork& work, int64_t begin,
                          int64_t end) {
  uint64_t sum = 0;
  for (int array = kParam; array < kWritten; ++array) {
    if (work.memory[array] == nullptr) {
      continue;
    }
    const int64_t size = element_size(work.layout, array);
    const auto& digest = table.digest[size == 8 ? 3 : size == 4 ? 2 : 1];
    const uint32_t salt = digest_salt(work.index, array);
    for_each_run(work, begin, end, [&](int64_t i, int64_t global, int64_t length) {
      sum += digest(element(work, array, i), salt, global, length);
    });
  }
  return sum;
}

inline ChunkTrace adam_traced(const KernelTable& table, const TensorScalars& scalars,
                              const TensorWork& work, const StepOptions& options, int64_t begin,
                              int64_t end) {
  const bool norms = (options.track & kTrackNorms) != 0;
  const bool counts_lost = (options.track & kTrackLost) != 0;
  const auto sum_of_squares = [&](DType dtype, const void* x, int64_t n) {
    return table.block_sum_of_squares[static_cast<int>(dtype)](x, n);
  };
  ChunkTrace trace{};
  for (int64_t i = begin; i < end; i += kTileElements) {
    const int64_t tile_end = end - i < kTileElements ? end : i + kTileElements;
    const int64_t n = tile_end - i;
    if (norms) {  // before the gradient may be written
      trace.grad_sumsq += sum_of_squares(work.layout.grad, element(work, kGrad, i), n);
    }
    if (norms || counts_lost) {
      alignas(64) double change[kTileElements];
      const int64_t lost = table.adam_traced(scalars, work, options, i, tile_end, change);
      trace.lost += counts_lost ? lost : 0;
      const bool is_double = work.layout.param == DType::kFloat64;
      if (norms) {
        trace.update_sumsq +=
            sum_of_squares(is_double ? DType::kFloat64 : DType::kFloat32, change, n);
      }
    } else {
      table.adam[static_cast<int>(work.kind)](scalars, work, options, i, tile_end, false);
    }
    if ((options.track & kTrackDigest) != 0) {
      trace.digest += digest_of(table, work, i, tile_end);
    }
  }
  return trace;
}

}  // namespace torchopt_ext

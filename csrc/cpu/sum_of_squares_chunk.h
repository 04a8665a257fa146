// Pass A on one chunk.
#pragma once

#include <algorithm>

#include "cpu/kernel_table.h"
#include "kernels/block_rule.h"
#include "work/work_list.h"

namespace torchopt_ext {

// Adds the squares of a chunk. Prefetches `next`, which pass A reads soon, unless it is null.
inline void add_chunk(const KernelTable& table, const TensorWork& work, const Chunk& chunk,
                      const void* next, ExactAccumulator& acc) {
  const auto dtype = static_cast<int>(work.layout.grad);
  const auto* grad = static_cast<const char*>(work.memory[kGrad]);
  const int64_t size = element_size(work.layout, kGrad);
  if (work.row_length >= kShortRow) {  // whole rows, or blocks of one row
    const int64_t length = std::min<int64_t>(work.row_length, chunk.count);
    const int64_t rows = chunk.count / length;
    table.add_rows[dtype](grad + chunk.begin * size, rows, length, next, acc);
    return;
  }
  for (int64_t i = chunk.begin; i < chunk.end(); i += kBlockElements) {
    const int64_t n = std::min(kBlockElements, chunk.end() - i);
    const void* after = i + n < chunk.end() ? grad + (i + n) * size : next;
    table.add_short_rows[dtype](grad + i * size, n, after, acc);
  }
}

}  // namespace torchopt_ext

// Products of matrices on all threads, or inside a parallel region on the calling one.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/product.h"

namespace torchopt_ext::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns how many threads are worth their start.
inline int64_t useful_threads(int64_t work, int64_t work_per_thread) {
  if (at::in_parallel_region()) {
    return 1;
  }
  return std::clamp<int64_t>(work / work_per_thread, 1, at::get_num_threads());
}

void multiply(const Product& p);

}  // namespace torchopt_ext::cpu

// Products of matrices on all threads, or inside a parallel region on the calling one.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "cpu/float_mode.h"
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

// Calls body(i, share) for each i below `count`. A thread, number `share`, takes the next i when it
// has done one.
template <class Body>
void share_out(int64_t threads, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(threads, count), 1, [&](int64_t share, int64_t) {
    const FloatMode mode;
    for (int64_t i = next++; i < count; i = next++) {
      body(i, share);
    }
  });
}

// Returns the thread's own scratch memory for products.
template <class Scratch>
Scratch& scratch() {
  static thread_local const auto memory = std::make_unique<Scratch>();
  return *memory;
}

void multiply(const Product& p);

}  // namespace torchopt_ext::cpu

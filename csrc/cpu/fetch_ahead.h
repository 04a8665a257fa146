// Prefetches what a loop over an array reads next.
#pragma once

#include <cstdint>

namespace torchopt_ext {
namespace {

// Prefetches the lines of `bytes` bytes from byte `at` on, into all caches, or with kLocality 2
// into all but L1. A no-op for lanes of one element, whose loops the compiler vectorizes.
template <class L, int kLocality = 3>
[[gnu::always_inline]] inline void prefetch_lines(const void* array, int64_t at, int64_t bytes) {
  if constexpr (L::width > 1) {
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(array) + at + line, /*write=*/0, kLocality);
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

// Prefetches what a loop over an array reads next.
//
// Pass B reads four or five arrays at once. Hardware prefetchers stop at the end of a page, which
// all arrays may reach together. On a Zen 4, prefetching 512 bytes ahead made pass B 10 to 15 %
// faster for tensors of any type that only memory holds; 256 and 768 bytes gave about half of that
// gain. On an Intel Xeon of 2023 all distances up to 8,192 bytes are equally fast.
#pragma once

#include <cstdint>

namespace torchopt_ext {
namespace {

inline constexpr int64_t kBytesAhead = 512;

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

// Prefetching of what a loop over an array comes to next.
//
// Pass B reads four or five arrays at once, and hardware prefetchers stop at the end of a page,
// where all arrays may end together. Asking for the lines 512 bytes ahead made it 10 to 15 % faster
// on a Zen 4 with tensors that memory holds, of any type; 256 and 768 bytes gave about half of
// that. On an Intel Xeon of 2023 distances up to 8,192 bytes are alike.
#pragma once

#include <cstdint>

namespace torchopt_ext {
namespace {

inline constexpr int64_t kBytesAhead = 512;

// Asks for each cache line of `bytes` from byte `at` of an array on, into all caches, or with 2
// into all but the first. Loops of single elements go without, as the compiler vectorises them.
template <class L, int kLocality = 3>
[[gnu::always_inline]] inline void fetch_lines(const void* array, int64_t at, int64_t bytes) {
  if constexpr (L::width > 1) {
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(array) + at + line, /*write=*/0, kLocality);
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

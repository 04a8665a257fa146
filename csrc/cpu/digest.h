// The digest (kernels/digest.h) on the CPU: a warp's threads are the elements of registers.
#pragma once

#include "kernels/digest.h"

namespace torchopt_ext {
namespace {

struct RegisterWarp {
  template <class T>
  struct PerThread {
    T value[kDigestThreads];
    T& operator[](int thread) { return value[thread]; }
  };
  template <class F>
  [[gnu::always_inline]] void each(const F& f) const {
    for (int thread = 0; thread < kDigestThreads; ++thread) {
      f(thread);
    }
  }
};

struct UpperHalfFactors {
  constexpr UpperHalfFactors() {
    for (uint32_t word = 0; word < kDigestSegment; ++word) {
      of[word] = upper_half_factor(word);
    }
  }
  alignas(64) int32_t of[kDigestSegment] = {};
};
inline constexpr UpperHalfFactors kUpperHalfFactors;

inline uint64_t digest(const DigestArray& array, int64_t begin, int64_t end) {
  const auto sums = warp_digest(RegisterWarp{}, array, begin, end,
                                [](int word) { return kUpperHalfFactors.of[word]; });
  uint64_t total = 0;
  for (const uint64_t sum : sums.value) {
    total += sum;
  }
  return total;
}

}  // namespace
}  // namespace torchopt_ext

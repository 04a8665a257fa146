// A 64-bit digest of what a step stores that does not depend on the order it is taken in: the sum,
// modulo 2**64, of every 32-bit word times an odd number of its place and an odd number of its
// array. Replicas that hold the same have the same digest, shards add up to the whole, and one
// flipped bit always changes it, by 2**k times an odd number, k < 32. An element's arrays share the
// number of its place, so that making it costs one multiplication for all of them.
// docs/numerics.md section 9.
#pragma once

#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

// What elements share whose numbers differ in kStreamBits.
TORCHOPT_HD inline uint32_t digest_base(uint32_t parameter, uint64_t element) {
  return static_cast<uint32_t>(mix64(mix64(parameter) + (element >> kStreamBits)));
}

// Of places that follow `number`, the lower half of the first one's number.
template <class W>
TORCHOPT_HD inline typename W::reg place_factors(uint32_t base, uint32_t number) {
  auto x = W::add(W::multiples(kWeylStep), W::set1(number * kWeylStep + base));
  x = W::multiply(W::bit_xor(x, W::template shifted<16>(x)), W::set1(0x21f0aaadu));
  return W::bit_or(W::bit_xor(x, W::template shifted<15>(x)), W::set1(1));
}

// Of an array's words; of the upper halves of fp64 elements.
TORCHOPT_HD constexpr uint64_t array_factor(int array, bool is_upper = false) {
  const int number = array + (is_upper ? kWritten : 0) + 1;
  return mix64(static_cast<uint64_t>(number)) | 1;
}

// Calls visit(array) for the arrays of elements that a step stores.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_stored(const Layout& layout,
                                                               const Visit& visit) {
  visit(kParam);
  visit(kExpAvg);
  visit(kExpAvgSq);
  if (layout.amsgrad) {
    visit(kMaxExpAvgSq);
  }
  if (layout.master != Master::kNone) {
    visit(kMaster);
  }
}

// Of element i of all arrays of a parameter that is computed in T, whose place has `factor`.
template <class T>
TORCHOPT_HD inline uint64_t digest_element(const Layout& layout, void* const (&x)[kArrays],
                                           int64_t i, uint32_t factor) {
  uint64_t sum = 0;
  for_each_stored(layout, [&](Array array) {
    const void* const memory = x[array];
    if constexpr (sizeof(T) == sizeof(double)) {
      const auto bits = bit_cast<uint64_t>(static_cast<const double*>(memory)[i]);
      sum += (bits & 0xffffffffu) * factor * array_factor(array) +
             (bits >> 32) * factor * array_factor(array, true);
    } else {
      const int64_t size = element_size(layout, array);
      const char* const at = static_cast<const char*>(memory) + size * i;
      const uint64_t bits = size == 4   ? *reinterpret_cast<const uint32_t*>(at)
                            : size == 2 ? *reinterpret_cast<const uint16_t*>(at)
                                        : *reinterpret_cast<const uint8_t*>(at);
      sum += bits * factor * array_factor(array);
    }
  });
  return sum;
}

// Of a group's scales, at the place of its first element.
TORCHOPT_HD inline uint64_t digest_scales(void* const (&x)[kArrays], int64_t group,
                                          uint32_t factor) {
  const auto of = [&](Array array) {
    const auto bits = bit_cast<uint32_t>(static_cast<const float*>(x[array])[group]);
    return static_cast<uint64_t>(bits) * factor * array_factor(array);
  };
  return of(kExpAvgScale) + of(kExpAvgSqScale);
}

}  // namespace
}  // namespace torchopt_ext

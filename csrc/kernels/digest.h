// A 64-bit digest of memory that does not depend on the order it is taken in: the sum, modulo
// 2**64, of every 32-bit word times an odd number that belongs to its place. Replicas that hold
// the same have the same digest, shards add up to the whole, and one flipped bit always changes it,
// by 2**k times an odd number. docs/numerics.md section 9.
#pragma once

#include "kernels/tensor_work.h"

namespace torchopt_ext {

namespace {

// The finaliser "lowbias32" (C. Wellons, "Prospecting for hash functions").
inline constexpr uint32_t kMixFirst = 0x21f0aaadu;
inline constexpr uint32_t kMixSecond = 0xd35a2d97u;

TORCHOPT_HD inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * kMixFirst;
  x = (x ^ (x >> 15)) * kMixSecond;
  return x ^ (x >> 15);
}

// What all elements of one of a parameter's arrays share.
TORCHOPT_HD inline uint32_t digest_salt(uint32_t parameter, int array) {
  return mix(parameter * kWritten + static_cast<uint32_t>(array) + 1u);
}

// What elements with the same upper half of their number share.
TORCHOPT_HD inline uint32_t digest_base(uint32_t salt, uint64_t element) {
  return mix(salt + static_cast<uint32_t>(element >> 32));
}

TORCHOPT_HD inline uint64_t digest_word(uint32_t base, uint32_t low_element, uint32_t word) {
  return uint64_t{word} * (mix(low_element ^ base) | 1u);
}

// A run of elements of 2, 4 or 8 bytes whose numbers share their upper half. The halves of a double
// have salts of their own.
template <class Bits>
TORCHOPT_HD inline uint64_t digest_run(uint32_t salt, uint64_t first_element, const Bits* bits,
                                       int64_t n) {
  const uint32_t base = digest_base(salt, first_element);
  const auto first = static_cast<uint32_t>(first_element);
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += digest_word(base, first + static_cast<uint32_t>(i), static_cast<uint32_t>(bits[i]));
  }
  if constexpr (sizeof(Bits) == 8) {
    const uint32_t high_base = digest_base(mix(salt), first_element);
    for (int64_t i = 0; i < n; ++i) {
      sum += digest_word(high_base, first + static_cast<uint32_t>(i),
                         static_cast<uint32_t>(bits[i] >> 32));
    }
  }
  return sum;
}

template <class Bits>
TORCHOPT_HD inline uint64_t digest_element(uint32_t salt, uint64_t element, Bits bits) {
  return digest_run(salt, element, &bits, 1);
}

}  // namespace
}  // namespace torchopt_ext

// Stochastic rounding to bf16: up with a probability of the part that is cut off, so that the mean
// is the exact value. The draws depend on seed, step, parameter and element alone, never on thread
// or rank. docs/numerics.md section 8.
#pragma once

#include "kernels/tensor_work.h"

namespace torchopt_ext {

struct RoundingKey {
  uint64_t seed;
  uint32_t step;
  uint32_t parameter;
};

struct PhiloxBlock {
  uint32_t word[4];
};

namespace {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u;
inline constexpr uint32_t kPhiloxMultiplier2 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9e3779b9u;
inline constexpr uint32_t kPhiloxKeyStep1 = 0xbb67ae85u;

TORCHOPT_HD inline PhiloxBlock philox(const RoundingKey& key, uint64_t index) {
  auto c0 = static_cast<uint32_t>(index);
  auto c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = key.step;
  uint32_t c3 = key.parameter;
  auto k0 = static_cast<uint32_t>(key.seed);
  auto k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * c0;
    const uint64_t b = uint64_t{kPhiloxMultiplier2} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

// The 64 random bits of an element: a block serves an even element and the odd one after it.
TORCHOPT_HD inline uint64_t random_of(const PhiloxBlock& block, bool odd) {
  const uint32_t low = odd ? block.word[2] : block.word[0];
  const uint32_t high = odd ? block.word[3] : block.word[1];
  return low | static_cast<uint64_t>(high) << 32;
}
TORCHOPT_HD inline uint64_t random_of(const RoundingKey& key, uint64_t element) {
  return random_of(philox(key, element / 2), element % 2 == 1);
}

// Of an element's 64 random bits, each array (kParam to kMaxExpAvgSq) uses 16. Infinity and the
// canonical NaN stay; a finite value stays finite.
TORCHOPT_HD inline BFloat16 narrow_stochastic(float x, uint64_t random, Array draw) {
  const auto bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + (static_cast<uint32_t>(random >> (16 * draw)) & 0xffffu)) >> 16;
  const bool overflowed = (rounded & 0x7fffu) == 0x7f80u && (bits & 0x7fffffffu) < 0x7f800000u;
  return {static_cast<uint16_t>(rounded - (overflowed ? 1u : 0u))};
}

}  // namespace
}  // namespace torchopt_ext

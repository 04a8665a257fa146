// Stochastic rounding to bf16: rounds up with a probability equal to the part that is cut off, so
// that the mean is the exact value. The draws depend only on seed, step, parameter and element,
// never on thread or rank. docs/numerics.md section 8.
//
// A key (tensor and step) has a stream for every 2^20 elements. From a stream, a run of elements
// draws two words for each element of a register, and each array of an element 16 bits of the
// words.
//
// The first word of an element's random bits mixes the element's number: a Weyl sequence, then
// multiplications and xor-shifts as in "lowbias32" (C. Wellons, "Prospecting for hash functions").
// A second key enters after a multiplication: a key that only moved the number would let two
// parameters share their draws at shifted elements. The second word is a product of the first.
// Operations are on 32-bit words, as wide as fp32; Philox4x32-10 takes 10 multiplications of twice
// the width for as many bits. docs/numerics.md says how the draws were tested.
#pragma once

#include "kernels/tensor_work.h"

namespace torchopt_ext {

struct RoundingKey {
  uint64_t seed;
  uint32_t step;
  uint32_t parameter;
};

// The keys of elements whose numbers differ only in their last kStreamBits bits. Over more elements
// the draws would show that few multiplications mix a word's upper bits.
struct RoundingStream {
  uint32_t key[2];
};

// The random bits of a register. Array a has half a % 2 of word[a / 2], where half 0 is the lower.
template <class W>
struct RandomWords {
  typename W::reg word[2];
};

namespace {

inline constexpr uint32_t kWeylStep = 0x9e3779b1u;

// The finalizer of SplitMix64 (Steele et al., OOPSLA 2014; its constants are Stafford's "Mix13").
TORCHOPT_HD constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

TORCHOPT_HD inline RoundingStream rounding_stream(const RoundingKey& key, uint64_t element) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t x = mix64(key.seed + kGolden);
  x = mix64(x ^ (static_cast<uint64_t>(key.step) << 32 | key.parameter));
  x = mix64(x + (element >> kStreamBits) * kGolden);
  return {{static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)}};
}

TORCHOPT_HD inline RoundingKey rounding_key(const StepOptions& options, const TensorWork& work) {
  return {options.rounding_seed, static_cast<uint32_t>(static_cast<int64_t>(step_of(work))),
          work.index};
}

// One word, for the host and for CUDA threads; cpu/lane_avx2.h and lane_avx512.h have registers.
struct ScalarWords {
  using reg = uint32_t;
  static constexpr int width = 1;
  TORCHOPT_HD static reg set1(uint32_t a) { return a; }
  // Returns `factor` times the distance of each element from the first. A register of a pair holds
  // elements 0 to 3, 8 to 11, ... of the pair (cpu/pair_lane.h).
  TORCHOPT_HD static reg multiples(uint32_t) { return 0; }
  TORCHOPT_HD static reg add(reg a, reg b) { return a + b; }
  TORCHOPT_HD static reg bit_xor(reg a, reg b) { return a ^ b; }
  TORCHOPT_HD static reg bit_and(reg a, reg b) { return a & b; }
  TORCHOPT_HD static reg multiply(reg a, reg b) { return a * b; }
  TORCHOPT_HD static reg shifted(reg a, int bits) { return a >> bits; }
};

// Returns the random bits of W's register, whose first element has this number (its lower half).
template <class W>
TORCHOPT_HD inline RandomWords<W> random_words(const RoundingStream& stream, uint32_t number) {
  using R = typename W::reg;
  const auto times = [](R x, uint32_t factor) { return W::multiply(x, W::set1(factor)); };
  R x = W::add(W::multiples(kWeylStep), W::set1(number * kWeylStep + stream.key[0]));
  x = times(W::bit_xor(x, W::shifted(x, 16)), 0x21f0aaadu);
  x = W::bit_xor(x, W::bit_xor(W::shifted(x, 15), W::set1(stream.key[1])));
  x = times(x, 0xd35a2d97u);
  x = W::bit_xor(x, W::shifted(x, 15));
  const R y = times(x, 0xac4c1b51u);
  return {{x, W::bit_xor(y, W::shifted(y, 16))}};
}

// Returns the 16 bits that decide the rounding of an array's element.
template <class W>
TORCHOPT_HD inline typename W::reg random_bits_of(const RandomWords<W>& random, Array array) {
  const typename W::reg word = random.word[array / 2];
  return array % 2 == 0 ? W::bit_and(word, W::set1(0xffffu)) : W::shifted(word, 16);
}

// Keeps infinity and the canonical NaN, whose lower halves are 0. Above the largest finite bf16 the
// upper neighbor is infinity.
TORCHOPT_HD inline BFloat16 narrow_stochastic(float x, uint32_t draw) {
  return {static_cast<uint16_t>((bit_cast<uint32_t>(x) + draw) >> 16)};
}

}  // namespace
}  // namespace torchopt_ext

// Random bits of elements that follow one another: kernels/stochastic.h, several blocks at a time.
#pragma once

#include <type_traits>

#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

// Elements from an even one on, as many as fill registers; returns how many. Four registers hold
// the four words of W::width blocks, a block a lane of 64 bits. Only lower halves count until the
// end, so that what a product leaves in the upper ones can stay.
template <class W>
int64_t random_bits_of_blocks(const RoundingKey& key, uint64_t first, uint64_t* to, int64_t n) {
  using R = typename W::reg;
  if (n < 2 * W::width) {
    return 0;
  }
  const R m0 = W::set1(kPhiloxMultiplier0);
  const R m2 = W::set1(kPhiloxMultiplier2);
  R keys[kPhiloxRounds][2];
  auto k0 = static_cast<uint32_t>(key.seed);
  auto k1 = static_cast<uint32_t>(key.seed >> 32);
  for (auto& round : keys) {
    round[0] = W::set1(k0);
    round[1] = W::set1(k1);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  int64_t i = 0;
  for (; i + 2 * W::width <= n; i += 2 * W::width) {
    const uint64_t block = (first + static_cast<uint64_t>(i)) / 2;
    R c0 = W::add(W::set1(block), W::numbers_to_pair());
    R c1 = W::high(c0);
    R c2 = W::set1(key.step);
    R c3 = W::set1(key.parameter);
    for (const auto& round : keys) {
      const R a = W::multiply_lower_halves(c0, m0);
      const R b = W::multiply_lower_halves(c2, m2);
      c0 = W::bit_xor(W::bit_xor(W::high(b), c1), round[0]);
      c1 = b;
      c2 = W::bit_xor(W::bit_xor(W::high(a), c3), round[1]);
      c3 = a;
    }
    W::store_pairs(to + i, W::joined(c0, c1), W::joined(c2, c3));
  }
  return i;
}

// W is void where there are no lanes.
template <class W>
void random_bits(const RoundingKey& key, int64_t first_element, uint64_t* to, int64_t n) {
  const auto first = static_cast<uint64_t>(first_element);
  int64_t i = 0;
  if (n > 0 && first % 2 == 1) {
    to[i++] = random_of(key, first);
  }
  if constexpr (!std::is_void_v<W>) {
    i += random_bits_of_blocks<W>(key, first + static_cast<uint64_t>(i), to + i, n - i);
  }
  for (; i + 2 <= n; i += 2) {
    const PhiloxBlock block = philox(key, (first + static_cast<uint64_t>(i)) / 2);
    to[i] = random_of(block, false);
    to[i + 1] = random_of(block, true);
  }
  if (i < n) {
    to[i] = random_of(key, first + static_cast<uint64_t>(i));
  }
}

}  // namespace
}  // namespace torchopt_ext

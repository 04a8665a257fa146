// A 64-bit digest of what a step stores that does not depend on the order it is taken in: the sum,
// modulo 2**64, of every 32-bit word times an odd number of its place and an odd number of its
// array. A word has two elements of 16 bits or four of 8 bits, counted from the parameter's start;
// they are added one by one where a shard cuts it. Replicas that hold the same have the same
// digest, shards add up to the whole, and one flipped bit always changes it, by 2**k times an odd
// number, k < 32. docs/numerics.md section 9.
#pragma once

#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

// What elements share whose numbers differ in kStreamBits.
TORCHOPT_HD inline uint32_t digest_base(uint32_t parameter, uint64_t element) {
  return static_cast<uint32_t>(mix64(mix64(parameter) + (element >> kStreamBits)));
}

// The places of elements `number`, the lower half of one's number, and every kStep-th that follows.
template <class W, uint32_t kStep = 1>
TORCHOPT_HD inline typename W::reg place_factors(uint32_t base, uint32_t number) {
  auto x = W::add(W::multiples(kStep * kWeylStep), W::set1(number * kWeylStep + base));
  x = W::multiply(W::bit_xor(x, W::template shifted<16>(x)), W::set1(0x21f0aaadu));
  return W::bit_or(W::bit_xor(x, W::template shifted<15>(x)), W::set1(1));
}

// Of an array's words; of the upper halves of fp64 elements.
TORCHOPT_HD constexpr uint64_t array_factor(int array, bool is_upper = false) {
  const int number = array + (is_upper ? kWritten : 0) + 1;
  return mix64(static_cast<uint64_t>(number)) | 1;
}

// Calls visit(array) for the arrays of elements that a step stores, but for parameters beside fp32
// masters, whose roundings they are: they may have gone past the caches.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_stored(const Layout& layout,
                                                               const Visit& visit) {
  if (layout.master != Master::kFloat32) {
    visit(kParam);
  }
  visit(kExpAvg);
  visit(kExpAvgSq);
  if (layout.amsgrad) {
    visit(kMaxExpAvgSq);
  }
  if (layout.master != Master::kNone) {
    visit(kMaster);
  }
}

// Where an element lies in its parameter.
struct DigestPlace {
  uint32_t base;    // digest_base()
  uint32_t number;  // the lower half of the element's
};
TORCHOPT_HD inline DigestPlace digest_place(uint32_t parameter, uint64_t element, int behind = 0) {
  return {digest_base(parameter, element),
          static_cast<uint32_t>(element) + static_cast<uint32_t>(behind)};
}

// Elements of an array that share a word of 32 bits; of fp64, one has two words of one number.
TORCHOPT_HD constexpr uint32_t elements_in_word(int64_t size) {
  return size < 4 ? static_cast<uint32_t>(4 / size) : 1;
}

// The factor of the word that has an element of `size` bytes: that of its first element's place.
TORCHOPT_HD inline uint32_t place_factor(const DigestPlace& place, int64_t size) {
  const uint32_t in_word = place.number % elements_in_word(size);
  return place_factors<ScalarWords>(place.base, place.number - in_word);
}

// Of element i of all arrays of a parameter that is computed in T.
template <class T>
TORCHOPT_HD inline uint64_t digest_element(const Layout& layout, void* const (&x)[kArrays],
                                           int64_t i, const DigestPlace& place) {
  uint64_t sum = 0;
  for_each_stored(layout, [&](Array array) {
    const int64_t size = element_size(layout, array);
    const uint64_t factor = place_factor(place, size);
    const char* const at = static_cast<const char*>(x[array]) + size * i;
    if constexpr (sizeof(T) == sizeof(double)) {
      const auto bits = bit_cast<uint64_t>(static_cast<const double*>(x[array])[i]);
      sum += (bits & 0xffffffffu) * factor * array_factor(array) +
             (bits >> 32) * factor * array_factor(array, true);
    } else {
      const uint64_t bits = size == 4   ? *reinterpret_cast<const uint32_t*>(at)
                            : size == 2 ? *reinterpret_cast<const uint16_t*>(at)
                                        : *reinterpret_cast<const uint8_t*>(at);
      const auto before = static_cast<int>(place.number % elements_in_word(size));
      sum += (bits << (8 * size * before)) * factor * array_factor(array);
    }
  });
  return sum;
}

// Of a group's scales, at the place of its first element.
TORCHOPT_HD inline uint64_t digest_scales(void* const (&x)[kArrays], int64_t group,
                                          const DigestPlace& place) {
  const uint64_t factor = place_factor(place, sizeof(float));
  const auto of = [&](Array array) {
    return bit_cast<uint32_t>(static_cast<const float*>(x[array])[group]) * factor *
           array_factor(array);
  };
  return of(kExpAvgScale) + of(kExpAvgSqScale);
}

}  // namespace
}  // namespace torchopt_ext

// A 64-bit digest of the values that a step stores, independent of their order. It is the sum,
// modulo 2**64, of the signed 16-bit halves of words, each half times three odd factors: of the
// half's place in its segment of 512 elements, of the word's lane of the segment (every eighth
// word) and of the array. Words are counted from the parameter's start. Words of fp64 elements and
// of scales are not split; they have a factor of their element and one of their array. Replicas
// with the same values have the same digest, digests of shards add up to the whole wherever it is
// cut, and one flipped bit always changes the digest. The halves of 32 words of a lane, times their
// first factors, add up to a signed 32-bit number: registers take one product and one sum for all
// of their halves. docs/numerics.md section 9.
#pragma once

#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

inline constexpr uint32_t kDigestSegment = 512;  // elements

// Returns the factor of a half's place in its segment; half 2 * k is the lower half of fp32 element
// k. All differ, so exchanged halves show. A word's two factors add up to 2048, which bounds sums.
TORCHOPT_HD constexpr int half_factor(uint32_t half) {
  uint32_t x = half / 2 * 317 % kDigestSegment;  // each step is a permutation of the words
  x = (x ^ (x >> 4)) * 229 % kDigestSegment;
  const int factor = static_cast<int>(2 * x + 1);
  return half % 2 == 0 ? 2048 - factor : factor;
}

// Returns the factor of an array, or of the upper words of its fp64 elements.
TORCHOPT_HD constexpr uint64_t array_factor(int array, bool is_upper = false) {
  const int number = array + (is_upper ? kElementArrays : 0) + 1;
  return mix64(static_cast<uint64_t>(number)) | 1;
}

// Calls visit(array) for the per-element arrays that a step stores, except for parameters with an
// fp32 master: they are the master rounded, and may have been stored past the caches.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_stored(const Layout& layout,
                                                               const Visit& visit) {
  for_each_written(
      layout, [&](Array array) __attribute__((always_inline)) {
        if (array != kParam || layout.master != Master::kFloat32) {
          visit(array);
        }
      });
}

// The place of an element in its parameter.
struct DigestPlace {
  uint32_t base;    // the same for elements whose numbers differ only in their lowest kStreamBits
  uint32_t number;  // the lower half of the element's number
};
TORCHOPT_HD inline DigestPlace digest_place(uint32_t parameter, uint64_t element, int behind = 0) {
  return {static_cast<uint32_t>(mix64(mix64(parameter) + (element >> kStreamBits))),
          static_cast<uint32_t>(element) + static_cast<uint32_t>(behind)};
}

inline constexpr uint32_t kDigestLanes = 8;

// Returns the factor of an element.
TORCHOPT_HD inline int32_t element_factor(const DigestPlace& place) {
  uint32_t x = place.number * kWeylStep + place.base;
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  return static_cast<int32_t>((x ^ (x >> 15)) | 1);
}

// Returns the factor of the lane of a word of the place's segment.
TORCHOPT_HD inline int32_t lane_factor(const DigestPlace& place, uint32_t word) {
  const uint32_t segment = place.number / kDigestSegment * kDigestSegment;
  return element_factor({place.base, segment + word % kDigestLanes});
}

// Returns the bits of element i of an array whose elements have at most 4 bytes.
TORCHOPT_HD inline uint32_t element_bits(const void* x, int64_t size, int64_t i) {
  return size == 4   ? static_cast<const uint32_t*>(x)[i]
         : size == 2 ? static_cast<const uint16_t*>(x)[i]
                     : static_cast<const uint8_t*>(x)[i];
}

// Returns the sum of such an element's halves, each times the factor of its place in the segment.
// `factor` is half_factor or an equivalent table.
template <class Factor>
TORCHOPT_HD inline int32_t weighted_element(uint32_t bits, int64_t size, uint32_t in_segment,
                                            const Factor& factor) {
  if (size == 4) {
    return static_cast<int16_t>(bits) * factor(2 * in_segment) +
           static_cast<int16_t>(bits >> 16) * factor(2 * in_segment + 1);
  }
  if (size == 2) {
    return static_cast<int16_t>(bits) * factor(in_segment);
  }
  // The byte is half of a half; the upper byte of a half holds the sign.
  const int byte =
      in_segment % 2 == 0 ? static_cast<uint8_t>(bits) : static_cast<int8_t>(bits) * 256;
  return byte * factor(in_segment / 2);
}

// Returns the factor of a whole word, used where few words are added.
TORCHOPT_HD inline uint64_t whole_word_factor(const DigestPlace& place) {
  return static_cast<uint64_t>(int64_t{element_factor(place)});
}

// Returns the digest of element i of all arrays of a parameter that is computed in T.
template <class T>
TORCHOPT_HD inline uint64_t digest_element(const Layout& layout, void* const (&x)[kArrays],
                                           int64_t i, const DigestPlace& place) {
  uint64_t sum = 0;
  if constexpr (sizeof(T) == sizeof(double)) {
    for_each_stored(layout, [&](Array array) {
      const auto bits = bit_cast<uint64_t>(static_cast<const double*>(x[array])[i]);
      sum += (bits & 0xffffffffu) * array_factor(array) + (bits >> 32) * array_factor(array, true);
    });
    return sum * whole_word_factor(place);
  } else {
    const uint32_t in_segment = place.number % kDigestSegment;
    for_each_stored(layout, [&](Array array) {
      const int64_t size = element_size(layout, array);
      const int64_t element =
          weighted_element(element_bits(x[array], size, i), size, in_segment, half_factor);
      const int64_t lane = lane_factor(place, in_segment * static_cast<uint32_t>(size) / 4);
      sum += static_cast<uint64_t>(element * lane) * array_factor(array);
    });
    return sum;
  }
}

// Returns the digest of a group's scales, at the place of the group's first element.
TORCHOPT_HD inline uint64_t digest_scales(void* const (&x)[kArrays], int64_t group,
                                          const DigestPlace& place) {
  const auto of = [&](Array array) {
    return bit_cast<uint32_t>(static_cast<const float*>(x[array])[group]) * array_factor(array);
  };
  return (of(kExpAvgScale) + of(kExpAvgSqScale)) * whole_word_factor(place);
}

}  // namespace
}  // namespace torchopt_ext

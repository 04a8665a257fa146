// The digest (kernels/digest.h) of a tile that a warp has stored and that is still in the
// first-level cache. A thread takes pairs of elements and multiplies once for each segment.
#pragma once

#include <type_traits>

#include "cuda/adam.h"
#include "kernels/block_rule.h"
#include "kernels/digest.h"
#include "kernels/trace.h"

namespace torchopt_ext {
namespace {

// half_factor() from a block's table.
struct SharedHalfFactors {
  TORCHOPT_HD int operator()(uint32_t half) const {
    const int factor = upper_factors[half / 2];
    return half % 2 == 0 ? 2048 - factor : factor;
  }
  const uint16_t* upper_factors;  // the factor of each word's upper half
};

// Two elements at once; TwoElementsAnywhere takes any address.
template <class T>
using TwoElements = VectorLane<T, 2>;
template <class T>
using TwoElementsAnywhere = VectorLane<T, 2, 2, 2, 1>;

// Returns the digest of the pairs (i, i + 1), kBlockLanes apart, that end by `end`, and leaves i at
// the first pair that does not. The elements' numbers start at the place's, which is even, and grow
// with i. The sum of the halves of a segment's words in one lane is multiplied by lane_factor. The
// sum covers at most 8 words, so its magnitude is at most 2**29.
template <class L>
TORCHOPT_HD inline uint64_t digest_pairs(const Layout& layout, void* const (&x)[kArrays], int& i,
                                         int end, DigestPlace place,
                                         const SharedHalfFactors& factors) {
  static_assert(kTileElements / kBlockLanes == 8 && kBlockLanes / 4 % kDigestLanes == 0);
  // Sums of halves of each element of a pair; all in [0] if the elements share a word.
  int32_t halves[kElementArrays][2]{};
  int64_t sums[kElementArrays]{};  // without the array's factor
  const auto multiply = [&] {
    for_each_stored(layout, [&](Array array) {
      const auto size = static_cast<uint32_t>(element_size(layout, array));
      unrolled<2>([&](int k) {
        if (k == 0 || size == 4) {
          const uint32_t element = place.number % kDigestSegment + static_cast<uint32_t>(k);
          sums[array] += halves[array][k] * int64_t{lane_factor(place, element * size / 4)};
          halves[array][k] = 0;
        }
      });
    });
  };
  uint32_t number = place.number;
  for (; i + 1 < end; i += kBlockLanes, number += kBlockLanes) {
    if (number / kDigestSegment != place.number / kDigestSegment) {
      multiply();
      place.number = number;
    }
    const uint32_t pair = number % kDigestSegment / 2;
    for_each_stored(layout, [&](Array array) {
      const auto size = static_cast<int>(element_size(layout, array));
      const auto bits = L::load_bits_of(size, static_cast<const char*>(x[array]) + i * size);
      unrolled<2>([&](int k) {
        const auto in_segment = 2 * pair + static_cast<uint32_t>(k);
        const int32_t element = weighted_element(bits.element[k], size, in_segment, factors);
        if (size == 4) {  // a non-constant index would put the array in memory
          halves[array][k] += element;
        } else {
          halves[array][0] += element;
        }
      });
    });
  }
  multiply();
  uint64_t digest = 0;
  for_each_stored(layout, [&](Array array) {
    digest += static_cast<uint64_t>(sums[array]) * array_factor(array);
  });
  return digest;
}

// Adds the digest of elements [begin, end), at most a tile, to the digests of a warp's threads.
// place_of(i) returns the place of an element that is not taken in a pair.
template <AdamKind kKind, class Warp, class PlaceOf>
TORCHOPT_HD inline void digest_tile(const Warp& warp,
                                    typename Warp::template PerThread<uint64_t>& digest,
                                    const AdamChunk<kKind>& elements,
                                    const SharedHalfFactors& factors, int begin, int end,
                                    const PlaceOf& place_of) {
  using T = ComputeType<kKind>;
  const Layout& layout = elements.layout;
  const TensorWork& work = elements.work;
  const auto first = static_cast<uint64_t>(global_element(work, elements.begin + begin));
  const auto last = static_cast<uint64_t>(global_element(work, elements.begin + end - 1));
  // Pairs need consecutive numbers of one base. An even first number keeps each pair of 16-bit
  // (8-bit) elements within a word (half).
  const bool in_pairs = last - first == static_cast<uint64_t>(end - 1 - begin) &&
                        first >> kStreamBits == last >> kStreamBits && first % 2 == 0;
  const bool aligned = are_all_aligned_at(layout, elements.x, 2, begin);
  warp.each([&](int thread) {
    int i = begin + 2 * thread;
    if constexpr (std::is_same_v<T, float>) {
      if (in_pairs) {
        const DigestPlace place = digest_place(work.index, first, 2 * thread);
        digest[thread] +=
            aligned
                ? digest_pairs<TwoElements<T>>(layout, elements.x, i, end, place, factors)
                : digest_pairs<TwoElementsAnywhere<T>>(layout, elements.x, i, end, place, factors);
      }
    }
    for (; i < end; i += kBlockLanes) {
      digest[thread] += digest_element<T>(layout, elements.x, i, place_of(i));
      if (i + 1 < end) {
        digest[thread] += digest_element<T>(layout, elements.x, i + 1, place_of(i + 1));
      }
    }
  });
}

}  // namespace
}  // namespace torchopt_ext

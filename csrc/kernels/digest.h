// A 64-bit digest of arrays of parameters, independent of the order of their elements. It is the
// sum, modulo 2**64, of the signed 16-bit halves of words, each half times three odd factors: of
// the half's place in its segment of 512 elements, of the word's lane of the segment (every eighth
// word) and of the array's role. Words are counted from the parameter's start. Words of fp64
// elements and of scales are not split; they have a factor of their element and one of their role.
// Replicas with the same values have the same digest, digests of shards add up to the whole
// wherever it is cut, and one flipped bit always changes the digest. docs/numerics.md section 9.
#pragma once

#include "kernels/quantize.h"
#include "kernels/stochastic.h"

namespace torchopt_ext {

inline constexpr uint32_t kDigestSegment = 512;  // elements
inline constexpr int kDigestLanes = 8;
inline constexpr int kDigestThreads = 32;      // a warp's
inline constexpr int64_t kDigestChunk = 8192;  // elements that a warp adds
inline constexpr int kFirstScaleRole = 5;      // roles from here on are of scales
inline constexpr int kDigestUpperWord = 5;     // added to the role of fp64 elements' upper words

// An array of a parameter, or of its shard. A digest reads memory[kParam], numel, row_length (with
// 8-bit moments the length of the parameter's rows, otherwise 0), the place, and of layout.param
// only the size; `group` is the role.
using DigestArray = TensorWork;

namespace {

// Returns the factor of a word's upper half by the word's place in its segment. All differ, so
// exchanged halves show. The lower half's factor is 2048 less this factor.
TORCHOPT_HD constexpr int32_t upper_half_factor(uint32_t word) {
  uint32_t x = word * 317 % kDigestSegment;  // each step is a permutation of the words
  x = (x ^ (x >> 4)) * 229 % kDigestSegment;
  return static_cast<int32_t>(2 * x + 1);
}

// Returns the sum of a word's signed halves times their factors; at most 2**26 in magnitude.
TORCHOPT_HD constexpr int32_t weighted_halves(uint32_t word, int32_t upper_factor) {
  const int32_t lower = static_cast<int32_t>(word << 16) >> 16;
  const int32_t upper = static_cast<int32_t>(word) >> 16;
  return lower * 2048 + (upper - lower) * upper_factor;
}

TORCHOPT_HD constexpr uint64_t role_factor(int role) {
  return mix64(static_cast<uint64_t>(role) + 1) | 1;
}

// The same for elements whose numbers differ only in their lowest kStreamBits bits.
TORCHOPT_HD inline uint32_t digest_base(uint32_t parameter, int64_t element) {
  return static_cast<uint32_t>(
      mix64(mix64(parameter) + static_cast<uint64_t>(element >> kStreamBits)));
}

// Returns the factor of an element. A lane's is that of one of the first elements of its segment.
TORCHOPT_HD inline int32_t element_factor(uint32_t base, int64_t element) {
  uint32_t x = static_cast<uint32_t>(element) * kWeylStep + base;
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  return static_cast<int32_t>((x ^ (x >> 15)) | 1);
}

// Calls visit(first, last, number of `first`, base) for the runs of elements [begin, end) that are
// consecutive in the parameter, in one segment and of one base. All elements of a group of 8-bit
// moments use the base of the group's first element.
template <class Visit>
TORCHOPT_HD inline void for_each_segment(const DigestArray& array, int64_t begin, int64_t end,
                                         const Visit& visit) {
  for (int64_t i = begin; i < end;) {
    const int64_t number = global_element(array, i);
    int64_t first = number;  // the element that decides the base
    int64_t length = kDigestSegment - number % kDigestSegment;
    const auto limit = [&](int64_t most) { length = length < most ? length : most; };
    limit(end - i);
    if (array.run != 0) {
      limit(array.run - i % array.run);
    }
    if (array.row_length != 0) {
      const int64_t in_row = i % array.row_length;
      first -= in_row % kQuantGroup;
      if (first >> kStreamBits != number >> kStreamBits) {  // the end of a group
        limit(kQuantGroup - in_row % kQuantGroup);
        limit(array.row_length - in_row);
      }
    }
    visit(i, i + length, number, digest_base(array.index, first));
    i += length;
  }
}

// Returns the bytes [begin, end) of word `word` of memory, and zeros for the others.
TORCHOPT_HD inline uint32_t word_within(const char* memory, int word, int begin, int end) {
  uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) {
    const int byte = 4 * word + k;
    if (byte >= begin && byte < end) {
      bits |= static_cast<uint32_t>(static_cast<uint8_t>(memory[byte - begin])) << 8 * k;
    }
  }
  return bits;
}

// Returns each thread's part of the digest of elements [begin, end). A warp's thread (cuda/cta.h)
// takes every 32nd word of a segment, at most 16, all of one lane. factor(word) is
// upper_half_factor or a table of it.
template <class Warp, class Factor>
TORCHOPT_HD inline typename Warp::template PerThread<uint64_t> warp_digest(
    const Warp& warp, const DigestArray& array, int64_t begin, int64_t end, const Factor& factor) {
  typename Warp::template PerThread<uint64_t> sums{};         // without the role's factor
  typename Warp::template PerThread<uint64_t> upper_words{};  // of fp64 elements
  const auto* const memory = static_cast<const char*>(array.memory[kParam]);
  const auto product = [](uint64_t x, int32_t of_element) {
    return x * static_cast<uint64_t>(int64_t{of_element});
  };
  const auto each_element = [&](int64_t n, const auto& visit) {
    for (int64_t row = 0; row < n; row += kDigestThreads) {
      warp.each([&](int thread) {
        if (row + thread < n) {
          visit(thread, row + thread);
        }
      });
    }
  };
  const auto add_scales = [&] {
    const int64_t in_row = groups_in_row(array.row_length);
    each_element(end - begin, [&](int thread, int64_t k) {
      const int64_t group = begin + k;
      const int64_t first = group / in_row * array.row_length + group % in_row * kQuantGroup;
      const int64_t number = global_element(array, first);
      const auto bits = reinterpret_cast<const uint32_t*>(memory)[group];
      sums[thread] += product(bits, element_factor(digest_base(array.index, number), number));
    });
  };
  const auto size = static_cast<int>(element_size(array.layout.param));
  const auto add_segment = [&](int64_t first, int64_t last, int64_t number, uint32_t base) {
    const char* const from = memory + first * size;
    if (size == 8) {
      each_element(last - first, [&](int thread, int64_t k) {
        const auto bits = reinterpret_cast<const uint64_t*>(from)[k];
        const int32_t of_element = element_factor(base, number + k);
        sums[thread] += product(bits & 0xffffffffu, of_element);
        upper_words[thread] += product(bits >> 32, of_element);
      });
      return;
    }
    const auto in_segment = static_cast<int>(number % kDigestSegment);
    const int first_byte = in_segment * size;
    const int last_byte = first_byte + static_cast<int>(last - first) * size;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(from) - static_cast<unsigned>(first_byte)) % 4 == 0;
    typename Warp::template PerThread<int32_t> halves{};
    for (int row = first_byte / 4 / kDigestThreads * kDigestThreads; 4 * row < last_byte;
         row += kDigestThreads) {
      if (aligned && 4 * row >= first_byte && 4 * (row + kDigestThreads) <= last_byte) {
        const auto* const words = reinterpret_cast<const uint32_t*>(from + (4 * row - first_byte));
        warp.each([&](int thread) {
          halves[thread] += weighted_halves(words[thread], factor(row + thread));
        });
      } else {
        warp.each([&](int thread) {
          const uint32_t word = word_within(from, row + thread, first_byte, last_byte);
          halves[thread] += weighted_halves(word, factor(row + thread));
        });
      }
    }
    warp.each([&](int thread) {
      const int32_t lane = element_factor(base, number - in_segment + thread % kDigestLanes);
      sums[thread] += static_cast<uint64_t>(int64_t{halves[thread]} * lane);
    });
  };
  if (array.group >= kFirstScaleRole) {
    add_scales();
  } else {
    for_each_segment(array, begin, end, add_segment);
  }
  warp.each([&](int thread) {
    sums[thread] = sums[thread] * role_factor(array.group) +
                   upper_words[thread] * role_factor(array.group + kDigestUpperWord);
  });
  return sums;
}

}  // namespace
}  // namespace torchopt_ext

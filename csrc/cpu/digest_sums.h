// The digest (kernels/digest.h) of what a step stored of a tile, while that is in the first-level
// cache: a multiply-add of two 16-bit halves for each word.
#pragma once

#include <type_traits>

#include "kernels/digest.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// half_factor() of a segment's halves.
struct HalfFactors {
  constexpr HalfFactors() {
    for (uint32_t half = 0; half < 2 * kDigestSegment; ++half) {
      of[half] = static_cast<int16_t>(half_factor(half));
    }
  }
  alignas(64) int16_t of[2 * kDigestSegment] = {};
};
inline constexpr HalfFactors half_factors;

template <class W>
struct RegOf {
  using type = typename W::reg;
};
template <>
struct RegOf<void> {
  struct type {};
};

// Of each array's halves: products with their own and their segments' factors, summed. W has the
// operations on words of 32 bits; void: one half at a time.
template <class W>
class HalfSums {
 public:
  // `bytes` of an array, of one segment; factors of their halves. An even 8-bit element is first.
  [[gnu::always_inline]] void add(Array array, const char* from, int64_t bytes, const char* factors,
                                  int32_t segment) {
    int64_t done = 0;
    if constexpr (!std::is_void_v<W>) {
      using reg = typename W::reg;
      constexpr int64_t kBytes = int64_t{W::width} * 4;
      // Lanes stay within 2**31: 32 words, times 2048 (half_factor), times 2**15. Halves of 8-bit
      // elements may begin with an odd one, and both factors then add up to less than 4096, but
      // these have at most 16 words a lane.
      constexpr int64_t kMost = 32 * kBytes;
      const reg factor = W::set1(static_cast<uint32_t>(segment));
      while (bytes - done >= kBytes) {
        const int64_t last = done + (bytes - done < kMost ? bytes - done : kMost) - kBytes;
        reg sum{};
#pragma GCC unroll 4
        for (; done <= last; done += kBytes) {
          sum =
              W::add(sum, W::add_products_of_halves(W::load(from + done), W::load(factors + done)));
        }
        const reg even = W::multiply_lower(sum, factor);
        const reg odd = W::multiply_lower(W::upper(sum), factor);
        pairs_[array] = W::add_pairs(pairs_[array], W::add_pairs(even, odd));
      }
    }
    if (done < bytes) {
      rest_[array] += static_cast<uint64_t>(weighted(from, done, bytes, factors)) *
                      static_cast<uint64_t>(int64_t{segment});
    }
  }
  uint64_t total() const {
    uint64_t total = 0;
    for (int array = kParam; array < kWritten; ++array) {
      uint64_t sum = rest_[array];
      if constexpr (!std::is_void_v<W>) {
        uint64_t pairs[W::width / 2];
        W::store_pairs(pairs, pairs_[array]);
        for (const uint64_t pair : pairs) {
          sum += pair;
        }
      }
      total += sum * array_factor(array);
    }
    return total;
  }

 private:
  // Of bytes [at, end).
  static int64_t weighted(const char* from, int64_t at, int64_t end, const char* factors) {
    int64_t sum = 0;
    for (; at < end; at += 2) {
      const int low = static_cast<uint8_t>(from[at]);
      const int half = at + 1 < end ? low + static_cast<int8_t>(from[at + 1]) * 256 : low;
      int16_t factor;
      __builtin_memcpy(&factor, factors + at, sizeof(factor));
      sum += half * factor;
    }
    return sum;
  }

  typename RegOf<W>::type pairs_[kWritten] = {};
  uint64_t rest_[kWritten] = {};
};

// Of a tensor that is not computed in fp64.
template <class W>
class TileDigest {
 public:
  explicit TileDigest(const TensorWork& work) : work_(work) {}

  // Of elements [begin, end), where they follow one another in the parameter from element `number`
  // on, whose base all have.
  void add_run(int64_t begin, int64_t end, uint64_t number) {
    DigestPlace place = digest_place(work_.index, number);
    if (place.number % 2 != 0 && begin < end) {
      digest_ += digest_element<float>(work_.layout, work_.memory, begin++, place);
      ++place.number;
    }
    while (begin < end) {
      const uint32_t in_segment = place.number % kDigestSegment;
      const int64_t left = kDigestSegment - in_segment;
      const int64_t n = end - begin < left ? end - begin : left;
      const int32_t segment = segment_factor(place);
      for_each_stored(
          work_.layout, [&](Array array) __attribute__((always_inline)) {
            const int64_t size = element_size(work_.layout, array);
            sums_.add(array, static_cast<const char*>(work_.memory[array]) + size * begin, size * n,
                      reinterpret_cast<const char*>(half_factors.of) + size * in_segment, segment);
          });
      begin += n;
      place.number += static_cast<uint32_t>(n);
    }
  }
  // Of groups with 8-bit moments, and of their scales. A group's elements follow its first one.
  void add_groups(int64_t begin, int64_t end) {
    const Each<const float*> scales{static_cast<const float*>(work_.memory[kExpAvgScale]),
                                    static_cast<const float*>(work_.memory[kExpAvgSqScale])};
    Each<uint64_t> sums{};
    int64_t group = group_of(work_, begin);
    int64_t left = work_.row_length - begin % work_.row_length;  // of the row
    for (int64_t first = begin; first < end;) {  // of groups that follow one another
      const auto number = static_cast<uint64_t>(global_element(work_, first));
      DigestPlace place = digest_place(work_.index, number);
      int32_t segment = segment_factor(place);
      uint64_t next = number;
      int64_t i = first;
      do {
        const auto now = static_cast<uint32_t>(next);
        if (now / kDigestSegment != place.number / kDigestSegment) {
          place.number = now;
          segment = segment_factor(place);
        }
        const auto factor =
            static_cast<uint64_t>(int64_t{segment} * half_factors.of[2 * (now % kDigestSegment)]);
        sums.exp_avg += bit_cast<uint32_t>(scales.exp_avg[group]) * factor;
        sums.root += bit_cast<uint32_t>(scales.root[group]) * factor;
        ++group;
        const int64_t size = left < kQuantGroup ? left : kQuantGroup;
        left = left == size ? work_.row_length : left - size;
        i += size;
        next += static_cast<uint64_t>(size);
      } while (i < end && next >> kStreamBits == number >> kStreamBits &&
               static_cast<uint64_t>(global_element(work_, i)) == next);
      add_run(first, i, number);
      first = i;
    }
    digest_ += sums.exp_avg * array_factor(kExpAvgScale) + sums.root * array_factor(kExpAvgSqScale);
  }
  uint64_t total() const { return digest_ + sums_.total(); }

 private:
  const TensorWork& work_;
  HalfSums<W> sums_;
  uint64_t digest_ = 0;
};

// Of elements [begin, end) of a tensor, whole groups of those with 8-bit moments.
template <class W>
uint64_t digest_elements(const TensorWork& work, int64_t begin, int64_t end) {
  if (work.layout.param == DType::kFloat64) {
    uint64_t digest = 0;
    for_each_run(work, begin, end, [&](int64_t first, int64_t last, uint64_t number) {
      DigestPlace place = digest_place(work.index, number);
      for (int64_t i = first; i < last; ++i, ++place.number) {
        digest += digest_element<double>(work.layout, work.memory, i, place);
      }
    });
    return digest;
  }
  TileDigest<W> digest(work);
  if (is_quantized(work.kind)) {
    digest.add_groups(begin, end);
  } else {
    for_each_run(work, begin, end, [&](int64_t first, int64_t last, uint64_t number) {
      digest.add_run(first, last, number);
    });
  }
  return digest.total();
}

}  // namespace
}  // namespace torchopt_ext

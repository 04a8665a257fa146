// The digest (kernels/digest.h) of what a step stored of a tile, while that is in the caches: a
// multiply-add of two 16-bit halves for each word.
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
inline constexpr HalfFactors kHalfFactors;

// lane_factor() of a segment's words from word 0 to 7 on.
template <class W>
struct LaneFactors {
  explicit LaneFactors(const DigestPlace& place) {
    if constexpr (std::is_void_v<W>) {
      for (uint32_t word = 0; word < kWords; ++word) {
        of[word] = lane_factor(place, word);
      }
    } else {
      using reg = typename W::reg;
      const uint32_t segment = place.number / kDigestSegment * kDigestSegment;
      reg x = W::add(W::load(kSteps.of), W::set1(segment * kWeylStep + place.base));
      x = W::multiply(W::bit_xor(x, W::template shifted<16>(x)), W::set1(0x21f0aaadu));
      x = W::bit_or(W::bit_xor(x, W::template shifted<15>(x)), W::set1(1));
      for (uint32_t word = 0; word + W::width <= kWords; word += kDigestLanes) {
        W::store(of + word, x);
      }
    }
  }
  static constexpr uint32_t kWords = 24;
  alignas(64) int32_t of[kWords];

 private:
  struct Steps {
    constexpr Steps() {
      for (uint32_t word = 0; word < 16; ++word) {
        of[word] = word % kDigestLanes * kWeylStep;
      }
    }
    uint32_t of[16] = {};
  };
  static constexpr Steps kSteps{};
};

template <class W>
struct RegOf {
  using type = typename W::reg;
};
template <>
struct RegOf<void> {
  struct type {};
};

// Of each array's halves: products with their own and their lanes' factors, summed. W has the
// operations on words of 32 bits; void: one half at a time.
template <class W>
class HalfSums {
 public:
  // `bytes` of an array, of one segment, from the beginning of a word on; factors of their halves
  // and words.
  [[gnu::always_inline]] void add(Array array, const char* from, int64_t bytes, const char* factors,
                                  const int32_t* lanes) {
    int64_t done = 0;
    if constexpr (!std::is_void_v<W>) {
      using reg = typename W::reg;
      constexpr int64_t kBytes = int64_t{W::width} * 4;
      constexpr int64_t kMost = 32 * kBytes;  // times 2048 (half_factor), times 2**15: 2**31
      const reg lane = W::load(lanes);
      while (bytes - done >= kBytes) {
        const int64_t last = done + (bytes - done < kMost ? bytes - done : kMost) - kBytes;
        reg sum{};
#pragma GCC unroll 4
        for (; done <= last; done += kBytes) {
          sum =
              W::add(sum, W::add_products_of_halves(W::load(from + done), W::load(factors + done)));
        }
        const reg even = W::multiply_lower(sum, lane);
        const reg odd = W::multiply_lower(W::upper(sum), W::upper(lane));
        pairs_[array] = W::add_pairs(pairs_[array], W::add_pairs(even, odd));
      }
    }
    for (; done < bytes; done += 4) {
      const int64_t end = bytes - done < 4 ? bytes : done + 4;
      rest_[array] += static_cast<uint64_t>(weighted(from, done, end, factors) *
                                            lanes[done / 4 % kDigestLanes]);
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
    for (; place.number % 4 != 0 && begin < end; ++place.number) {  // to where words begin
      digest_ += digest_element<float>(work_.layout, work_.memory, begin++, place);
    }
    while (begin < end) {
      const uint32_t in_segment = place.number % kDigestSegment;
      const int64_t left = kDigestSegment - in_segment;
      const int64_t n = end - begin < left ? end - begin : left;
      const LaneFactors<W> lanes(place);
      for_each_stored(
          work_.layout, [&](Array array) __attribute__((always_inline)) {
            const int64_t size = element_size(work_.layout, array);
            const int64_t byte = size * in_segment;
            sums_.add(array, static_cast<const char*>(work_.memory[array]) + size * begin, size * n,
                      reinterpret_cast<const char*>(kHalfFactors.of) + byte,
                      lanes.of + byte / 4 % kDigestLanes);
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
      uint64_t next = number;
      int64_t i = first;
      do {
        place.number = static_cast<uint32_t>(next);
        const uint32_t in_segment = place.number % kDigestSegment;
        const auto factor = static_cast<uint64_t>(int64_t{lane_factor(place, in_segment)} *
                                                  kHalfFactors.of[2 * in_segment]);
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

// The digest (kernels/digest.h) of what a step stored of a chunk, added tile by tile, while each
// tile is in the caches. Each word takes one multiply-add of its two 16-bit halves.
#pragma once

#include <cstddef>

#include "kernels/digest.h"
#include "kernels/kinds.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// The results of half_factor() for the halves of a segment.
struct HalfFactors {
  constexpr HalfFactors() {
    for (uint32_t half = 0; half < 2 * kDigestSegment; ++half) {
      of[half] = static_cast<int16_t>(half_factor(half));
    }
  }
  alignas(64) int16_t of[2 * kDigestSegment] = {};
};
inline constexpr HalfFactors kHalfFactors;

// The results of lane_factor(), which repeat every 8 words. Registers load from words 0 to 7 on.
struct LaneFactors {
  explicit LaneFactors(const DigestPlace& place) {
    for (uint32_t word = 0; word < 24; ++word) {
      of[word] = lane_factor(place, word);
    }
  }
  alignas(64) int32_t of[24];
};

// Each array's sum of halves times their half factors and lane factors. W has the operations on
// 32-bit words. ScalarWords adds one word at a time.
template <class W>
class HalfSums {
 public:
  // Adds `bytes` bytes of an array, all in one segment, from the beginning of a word on. `factors`
  // and `lanes` begin with the factors of the first half and word.
  [[gnu::always_inline]] void add(Array array, const char* from, int64_t bytes,
                                  const int16_t* factors, const int32_t* lanes) {
    int64_t done = 0;
    if constexpr (W::width > 1) {
      using reg = typename W::reg;
      constexpr int64_t kBytes = int64_t{W::width} * 4;
      // A word adds at most 2**15 * 2048, as its half factors add up to 2048: int32 holds 32 words.
      constexpr int64_t kMost = 32 * kBytes;
      const reg lane = W::load(lanes);
      const auto* factor_bytes = reinterpret_cast<const char*>(factors);
      while (bytes - done >= kBytes) {
        const int64_t last = done + (bytes - done < kMost ? bytes - done : kMost) - kBytes;
        reg sum{};
#pragma GCC unroll 4
        for (; done <= last; done += kBytes) {
          sum = W::add(
              sum, W::add_products_of_halves(W::load(from + done), W::load(factor_bytes + done)));
        }
        const reg even = W::multiply_lower(sum, lane);
        const reg odd = W::multiply_lower(W::upper(sum), W::upper(lane));
        pairs_[array] = W::add_pairs(pairs_[array], W::add_pairs(even, odd));
      }
    }
    for (; done < bytes; done += 4) {
      uint32_t word = 0;  // a last part of a word is filled up with zeros
      if (bytes - done >= 4) {
        __builtin_memcpy(&word, from + done, 4);
      } else {
        __builtin_memcpy(&word, from + done, static_cast<size_t>(bytes - done));
      }
      const auto factor = [&](uint32_t half) { return int{factors[half]}; };
      const int64_t halves = weighted_element(word, 4, static_cast<uint32_t>(done / 4), factor);
      rest_[array] += static_cast<uint64_t>(halves * lanes[done / 4 % kDigestLanes]);
    }
  }
  uint64_t total(const Layout& layout) const {
    uint64_t total = 0;
    for_each_stored(layout, [&](Array array) {
      uint64_t sum = rest_[array];
      if constexpr (W::width > 1) {
        uint64_t pairs[W::width / 2];
        W::store(pairs, pairs_[array]);
        for (const uint64_t pair : pairs) {
          sum += pair;
        }
      }
      total += sum * array_factor(array);
    });
    return total;
  }

 private:
  typename W::reg pairs_[kElementArrays] = {};
  uint64_t rest_[kElementArrays] = {};
};

template <class W>
class ChunkDigest {
 public:
  explicit ChunkDigest(const TensorWork& work) : work_(work) {}

  // Adds elements [begin, end), which are whole groups if moments are 8-bit.
  void add(int64_t begin, int64_t end) {
    if (is_quantized(work_.kind)) {
      add_groups(begin, end);
      return;
    }
    for_each_run(work_, begin, end, [&](int64_t first, int64_t last, uint64_t number) {
      if (work_.layout.param == DType::kFloat64) {
        DigestPlace place = digest_place(work_.index, number);
        for (int64_t i = first; i < last; ++i, ++place.number) {
          digest_ += digest_element<double>(work_.layout, work_.memory, i, place);
        }
      } else {
        add_run(first, last, number);
      }
    });
  }
  uint64_t total() const { return digest_ + sums_.total(work_.layout); }

 private:
  // Adds elements [begin, end), which are contiguous in the parameter from element `number` on and
  // share its DigestPlace::base.
  void add_run(int64_t begin, int64_t end, uint64_t number) {
    DigestPlace place = digest_place(work_.index, number);
    for (; place.number % 4 != 0 && begin < end; ++place.number) {  // until a word begins
      digest_ += digest_element<float>(work_.layout, work_.memory, begin++, place);
    }
    while (begin < end) {
      const uint32_t in_segment = place.number % kDigestSegment;
      const int64_t left = kDigestSegment - in_segment;
      const int64_t n = end - begin < left ? end - begin : left;
      const LaneFactors lanes(place);
      for_each_stored(
          work_.layout, [&](Array array) __attribute__((always_inline)) {
            const int64_t size = element_size(work_.layout, array);
            const int64_t byte = size * in_segment;
            sums_.add(array, element(work_, array, begin), size * n, kHalfFactors.of + byte / 2,
                      lanes.of + byte / 4 % kDigestLanes);
          });
      begin += n;
      place.number += static_cast<uint32_t>(n);
    }
  }
  // Adds whole groups with 8-bit moments and their scales. All elements of a group use the base of
  // its first element. A run [first, i) ends where the numbers of elements are not consecutive, or
  // where a group begins in the next stream: a group that straddles the end of a stream belongs to
  // the stream of its first element.
  void add_groups(int64_t begin, int64_t end) {
    int64_t group = group_of(work_, begin);
    for (int64_t first = begin; first < end;) {
      const int64_t number = global_element(work_, first);
      const int64_t same_base = first + kStreamElements - number % kStreamElements;
      DigestPlace place = digest_place(work_.index, static_cast<uint64_t>(number));
      int64_t i = first;
      do {  // row by row
        const int64_t row_end = i + work_.row_length - i % work_.row_length;
        const int64_t last = row_end < end ? row_end : end;
        const int64_t groups = groups_in_row((last < same_base ? last : same_base) - i);
        place.number = static_cast<uint32_t>(number + i - first);
        for (int64_t k = 0; k < groups; ++k, place.number += kQuantGroup) {
          digest_ += digest_scales(work_.memory, group++, place);
        }
        i = i + groups * kQuantGroup < last ? i + groups * kQuantGroup : last;
      } while (i < end && i < same_base && global_element(work_, i) == number + i - first);
      add_run(first, i, static_cast<uint64_t>(number));
      first = i;
    }
  }

  const TensorWork& work_;
  HalfSums<W> sums_;
  uint64_t digest_ = 0;
};

}  // namespace
}  // namespace torchopt_ext

// What pass B notes of a register of elements while it has them (kernels/trace.h): the changes of
// weights as they are stored, how many did not change, and the digest of all that was stored.
#pragma once

#include "cpu/adam_loop.h"
#include "kernels/digest.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// The lane type's words of 32 bits; void where registers hold one element or doubles.
template <class L>
struct WordsOf {
  using type = void;
};
template <class L>
  requires requires { typename L::Words; }
struct WordsOf<L> {
  using type = typename L::Words;
};

// half_factor() of a segment's halves; registers of half as many bytes read beyond its end.
struct HalfFactors {
  constexpr HalfFactors() {
    for (uint32_t half = 0; half < 2 * kDigestSegment; ++half) {
      of[half] = static_cast<int16_t>(half_factor(half));
    }
  }
  alignas(64) int16_t of[2 * kDigestSegment + 16] = {};
};
inline constexpr HalfFactors half_factors;

// Whether registers have the halves of `count` elements: an element begins each array's word, and
// all are of one segment.
[[gnu::always_inline]] inline bool has_registers(const Layout& layout, uint32_t number, int count) {
  bool begins_words = true;
  for_each_stored(
      layout, [&](Array array) __attribute__((always_inline)) {
        const int64_t size = element_size(layout, array);
        begins_words = begins_words && number * static_cast<uint64_t>(size) % 4 == 0;
      });
  return begins_words && number % kDigestSegment + static_cast<uint32_t>(count) <= kDigestSegment;
}

// For each array, the sums of a segment's halves in 32 bits, and of segments in 64.
template <class W>
class DigestRegisters {
 public:
  using reg = typename W::reg;

  // Of kElements elements from element i on, where has_registers() says so.
  template <int kElements>
  [[gnu::always_inline]] void add(const Layout& layout, void* const (&x)[kArrays], int64_t i,
                                  const DigestPlace& place) {
    constexpr int64_t kBytes = int64_t{W::width} * 4;
    const int64_t in_segment = place.number % kDigestSegment;
    const auto* const factors = reinterpret_cast<const char*>(half_factors.of);
    for_each_stored(
        layout, [&](Array array) __attribute__((always_inline)) {
          const int64_t size = element_size(layout, array);
          const char* const from = static_cast<const char*>(x[array]) + size * i;
          // The last register may be half, of half as many bytes as W has.
          for (int64_t at = 0; at < size * kElements; at += kBytes) {
            const reg words =
                at + kBytes <= size * kElements ? W::load(from + at) : W::load_half(from + at);
            const reg factor = W::load(factors + size * in_segment + at);
            sums_[array] = W::add(sums_[array], W::add_products_of_halves(words, factor));
          }
        });
    place_ = place;
    // 32 words of an element each, times 2048 (half_factor), times 2**15, is 2**31. The next
    // elements may be of the next segment even where these do not end this one.
    constexpr uint32_t kMost = 32 * W::width;
    if (place.number % kMost + 2 * kElements > kMost) {
      finish_segment(layout);
    }
  }
  [[gnu::noinline]] void finish_segment(const Layout& layout) {
    const reg factor = W::set1(static_cast<uint32_t>(segment_factor(place_)));
    for_each_stored(
        layout, [&](Array array) __attribute__((always_inline)) {
          const reg even = W::multiply_lower(sums_[array], factor);
          const reg odd = W::multiply_lower(W::upper(sums_[array]), factor);
          totals_[array] = W::add_pairs(totals_[array], W::add_pairs(even, odd));
          sums_[array] = reg{};
        });
  }
  // Of finished segments.
  uint64_t total() const {
    uint64_t total = 0;
    for (int array = kParam; array < kWritten; ++array) {
      uint64_t pairs[W::width / 2];
      W::store_pairs(pairs, totals_[array]);
      uint64_t sum = 0;
      for (const uint64_t pair : pairs) {
        sum += pair;
      }
      total += sum * array_factor(array);
    }
    return total;
  }

 private:
  reg sums_[kWritten] = {};
  reg totals_[kWritten] = {};
  DigestPlace place_{};  // of the elements added last
};
template <>
struct DigestRegisters<void> {
  void finish_segment(const Layout& /*layout*/) const {}
  uint64_t total() const { return 0; }
};

// `change` holds the weights before, until it holds the changes; its first element is element
// `origin`.
template <class L, bool kChanges, bool kDigest>
class LoopTrace {
 public:
  using Scalar = typename L::scalar;
  static constexpr bool needs_numbers = kDigest;
  LoopTrace(int64_t origin, Scalar* change) : origin_(origin), change_(change) {}

  // What follows is of elements from `begin` on, whose numbers follow that of the first one.
  void start(const Layout& layout, const TensorWork& work, int64_t begin, uint64_t number) {
    if constexpr (kDigest) {
      finish(layout, work.memory);
      begin_ = begin;
      number_ = number;
      first_ = digest_place(work.index, number);
    }
  }
  // The same of a group, which may follow the one before.
  void start_group(const Layout& layout, const TensorWork& work, int64_t begin, uint64_t number) {
    if constexpr (kDigest) {
      const uint64_t next = number_ + static_cast<uint64_t>(begin - begin_);
      if (begin != end_ || number != next || number >> kStreamBits != number_ >> kStreamBits) {
        start(layout, work, begin, number);
        next_ = end_ = begin;
      }
    }
  }
  template <class Lane>
  [[gnu::always_inline]] void before(const Lane& lane, const Layout& layout,
                                     void* const (&x)[kArrays], int64_t i) const {
    if constexpr (kChanges) {
      lane.store(change_ + (i - origin_), load_weight(lane, layout, x, i));
    }
  }
  template <class Lane>
  [[gnu::always_inline]] void after(const Lane& lane, const Layout& layout,
                                    void* const (&x)[kArrays], int64_t i, bool decays) {
    if constexpr (kChanges) {
      const auto before = lane.load(change_ + (i - origin_));
      const auto after = load_weight(lane, layout, x, i);
      lane.store(change_ + (i - origin_), Lane::sub(after, before));
      lost_ += Lane::count_lost(before, after, load_exp_avg(lane, layout, x, i), decays);
    }
  }
  // After kMost elements from element i on were stored, or after the first n of them.
  template <int kMost>
  [[gnu::always_inline]] void stored(const Layout& layout, void* const (&x)[kArrays], int64_t i,
                                     int n) {
    if constexpr (kDigest) {
      const DigestPlace place = place_at(i);
      if constexpr (!std::is_void_v<Words> && kMost > 1) {
        if (n == kMost && has_registers(layout, place.number, kMost)) {
          registers_.template add<kMost>(layout, x, i, place);
          return;
        }
      }
      for (int k = 0; k < n; ++k) {
        add_element(layout, x, i + k);
      }
    }
  }
  // After a group's n elements from element i on were stored, and those before it. Groups of odd
  // rows begin anywhere in a segment: the digest takes as many elements where registers have them.
  void stored_group(const Layout& layout, void* const (&x)[kArrays], int64_t i, int n) {
    if constexpr (kDigest) {
      end_ = i + n;
      if constexpr (std::is_void_v<Words>) {
        finish(layout, x);
      } else {
        while (next_ < end_ && !has_registers(layout, place_at(next_).number, kQuantGroup)) {
          add_element(layout, x, next_++);
        }
        for (; next_ + kQuantGroup <= end_; next_ += kQuantGroup) {
          registers_.template add<kQuantGroup>(layout, x, next_, place_at(next_));
        }
      }
    }
  }
  // Takes what was stored and is left. What follows may be of another place.
  [[gnu::noinline]] void finish(const Layout& layout, void* const (&x)[kArrays]) {
    while (next_ < end_) {
      add_element(layout, x, next_++);
    }
    registers_.finish_segment(layout);
  }
  // After the scales of the group that begins at element i.
  void stored_scales(void* const (&x)[kArrays], int64_t i, int64_t group) {
    if constexpr (kDigest) {
      digest_ += digest_scales(x, group, place_at(i));
    }
  }
  void add_to(ChunkTrace& trace) const {
    trace.lost += lost_;
    trace.digest += digest_ + registers_.total();
  }

 private:
  using Words = typename WordsOf<L>::type;
  DigestPlace place_at(int64_t i) const {
    return {first_.base, first_.number + static_cast<uint32_t>(i - begin_)};
  }

  void add_element(const Layout& layout, void* const (&x)[kArrays], int64_t i) {
    digest_ += digest_element<Scalar>(layout, x, i, place_at(i));
  }

  int64_t origin_;
  Scalar* change_;
  // Of the digest: where the elements begin that follow one another; of groups, which is to be
  // taken next, and the end of those stored.
  int64_t begin_ = 0;
  int64_t next_ = 0;
  int64_t end_ = -1;     // no group follows
  uint64_t number_ = 0;  // of the first of them
  DigestPlace first_{};
  int64_t lost_ = 0;
  uint64_t digest_ = 0;
  DigestRegisters<std::conditional_t<kDigest, Words, void>> registers_;
};

}  // namespace
}  // namespace torchopt_ext

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

// The factors of words that begin with elements of kElements, by the size of elements. Those of
// narrow elements' words are among those of wide ones.
template <class W, int kElements>
class WordFactors {
 public:
  using reg = typename W::reg;
  [[gnu::always_inline]] WordFactors(const Layout& layout, const DigestPlace& place) {
    if (has(layout, 4)) {
      find<1>(words_, place);
      halve(words_, halves_);
    } else if (has(layout, 2)) {
      find<2>(halves_, place);
    }
    if (has(layout, 1)) {
      halve(halves_, bytes_);
    }
  }
  [[gnu::always_inline]] const reg* of(int64_t size) const {
    return size == 4 ? words_ : size == 2 ? halves_ : bytes_;
  }

 private:
  static constexpr int kWords = kElements / W::width;  // registers
  static constexpr int kHalves = (kWords + 1) / 2;
  static constexpr int kBytes = (kHalves + 1) / 2;
  [[gnu::always_inline]] static bool has(const Layout& layout, int64_t size) {
    bool any = false;
    for_each_stored(
        layout, [&](Array array) __attribute__((always_inline)) {
          any = any || element_size(layout, array) == size;
        });
    return any;
  }
  template <uint32_t kStep, int kCount>
  [[gnu::always_inline]] static void find(reg (&factors)[kCount], const DigestPlace& place) {
    for (int k = 0; k < kCount; ++k) {
      const auto first = static_cast<uint32_t>(k * W::width) * kStep;
      factors[k] = place_factors<W, kStep>(place.base, place.number + first);
    }
  }
  template <int kFrom, int kTo>
  [[gnu::always_inline]] static void halve(const reg (&from)[kFrom], reg (&to)[kTo]) {
    for (int k = 0; k < kTo; ++k) {
      to[k] = W::even_words(from[2 * k], from[kFrom > 2 * k + 1 ? 2 * k + 1 : 2 * k]);
    }
  }

  reg words_[kWords];
  reg halves_[kHalves];
  reg bytes_[kBytes];
};

// For each array, the sum of words times factors. Even words are the lower ones of a register's
// pairs.
template <class W>
struct DigestRegisters {
  using reg = typename W::reg;
  reg sums[kWritten] = {};

  // Of kElements elements from element i on, the first of each array's word.
  template <int kElements>
  [[gnu::always_inline]] void add(const Layout& layout, void* const (&x)[kArrays], int64_t i,
                                  const DigestPlace& place) {
    constexpr int64_t kBytes = int64_t{W::width} * 4;
    const WordFactors<W, kElements> factors(layout, place);
    for_each_stored(
        layout, [&](Array array) __attribute__((always_inline)) {
          const int64_t size = element_size(layout, array);
          // The last register may be half, of half as many bytes as W has.
          const char* const from = static_cast<const char*>(x[array]) + size * i;
          for (int64_t at = 0; at < size * kElements; at += kBytes) {
            const reg words =
                at + kBytes <= size * kElements ? W::load(from + at) : W::load_half(from + at);
            const reg factor = factors.of(size)[at / kBytes];
            const reg even = W::multiply_lower(words, factor);
            const reg odd = W::multiply_lower(W::upper(words), W::upper(factor));
            sums[array] = W::add_pairs(sums[array], W::add_pairs(even, odd));
          }
        });
  }
  uint64_t total() const {
    uint64_t total = 0;
    for (int array = kParam; array < kWritten; ++array) {
      uint64_t pairs[W::width / 2];
      W::store_pairs(pairs, sums[array]);
      uint64_t sum = 0;
      for (const uint64_t pair : pairs) {
        sum += pair;
      }
      total += sum * array_factor(array);
    }
    return total;
  }
};
template <>
struct DigestRegisters<void> {
  uint64_t total() const { return 0; }
};

// Whether the element is the first one in each array's word.
[[gnu::always_inline]] inline bool begins_words(const Layout& layout, uint32_t number) {
  bool all = true;
  for_each_stored(
      layout, [&](Array array) __attribute__((always_inline)) {
        all = all && number % elements_in_word(element_size(layout, array)) == 0;
      });
  return all;
}

// `change` holds the weights before, until it holds the changes; its first element is element
// `origin`.
template <class L, bool kChanges, bool kDigest>
class LoopTrace {
 public:
  using Scalar = typename L::scalar;
  static constexpr bool needs_numbers = kDigest;
  LoopTrace(int64_t origin, Scalar* change) : origin_(origin), change_(change) {}

  // What follows is of elements from `begin` on, whose numbers follow that of the first one.
  void start(const TensorWork& work, int64_t begin, uint64_t number) {
    if constexpr (kDigest) {
      begin_ = begin;
      first_ = digest_place(work.index, number);
    }
  }
  // The same of a group, which may follow the one before.
  void start_group(const Layout& layout, const TensorWork& work, int64_t begin, uint64_t number) {
    if constexpr (kDigest) {
      const DigestPlace place = digest_place(work.index, number);
      const DigestPlace next = place_at(begin);
      if (begin != end_ || place.base != next.base || place.number != next.number) {
        finish(layout, work.memory);
        begin_ = next_ = end_ = begin;
        first_ = place;
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
        if (n == kMost && begins_words(layout, place.number)) {
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
  // rows begin within words: the digest takes words that are whole, and those of two groups later.
  void stored_group(const Layout& layout, void* const (&x)[kArrays], int64_t i, int n) {
    if constexpr (kDigest) {
      end_ = i + n;
      if constexpr (std::is_void_v<Words>) {
        finish(layout, x);
      } else {
        while (next_ < end_ && !begins_words(layout, place_at(next_).number)) {
          add_element(layout, x, next_++);
        }
        for (; next_ + kQuantGroup <= end_; next_ += kQuantGroup) {
          registers_.template add<kQuantGroup>(layout, x, next_, place_at(next_));
        }
      }
    }
  }
  // Takes what was stored and is left.
  [[gnu::noinline]] void finish(const Layout& layout, void* const (&x)[kArrays]) {
    while (next_ < end_) {
      add_element(layout, x, next_++);
    }
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
  int64_t end_ = 0;
  DigestPlace first_{};
  int64_t lost_ = 0;
  uint64_t digest_ = 0;
  DigestRegisters<std::conditional_t<kDigest, Words, void>> registers_;
};

}  // namespace
}  // namespace torchopt_ext

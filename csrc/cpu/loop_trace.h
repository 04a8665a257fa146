// What pass B notes of a register of elements while it has them (kernels/trace.h): the changes of
// weights as they are stored, how many did not change, and the digest of all that was stored.
#pragma once

#include "cpu/adam_loop.h"
#include "kernels/digest.h"

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

// For each array, the sum of words times factors. Even words are the lower ones of a register's
// pairs.
template <class W>
struct DigestRegisters {
  using reg = typename W::reg;
  reg sums[kWritten] = {};

  [[gnu::always_inline]] void add(const Layout& layout, void* const (&x)[kArrays], int64_t i,
                                  uint32_t base, uint32_t number) {
    const reg factors = place_factors<W>(base, number);
    const reg upper_factors = W::upper(factors);
    for_each_stored(
        layout, [&](Array array) __attribute__((always_inline)) {
          const int64_t size = element_size(layout, array);
          const reg words = size == 4   ? W::load(static_cast<const uint32_t*>(x[array]) + i)
                            : size == 2 ? W::load(static_cast<const uint16_t*>(x[array]) + i)
                                        : W::load(static_cast<const uint8_t*>(x[array]) + i);
          const reg even = W::multiply_lower(words, factors);
          const reg odd = W::multiply_lower(W::upper(words), upper_factors);
          sums[array] = W::add_pairs(sums[array], W::add_pairs(even, odd));
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
      base_ = digest_base(work.index, number);
      number_ = static_cast<uint32_t>(number);
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
    if constexpr (kDigest) {
      const uint32_t number = number_ + static_cast<uint32_t>(i - begin_);
      if constexpr (std::is_same_v<Lane, L> && !std::is_void_v<Words>) {
        for (int k = 0; k < L::width; k += Words::width) {
          registers_.add(layout, x, i + k, base_, number + static_cast<uint32_t>(k));
        }
      } else {
        const int n = count(lane);
        for (int k = 0; k < n; ++k) {
          const uint32_t factor =
              place_factors<ScalarWords>(base_, number + static_cast<uint32_t>(k));
          digest_ += digest_element<Scalar>(layout, x, i + k, factor);
        }
      }
    }
  }
  // After those of a group of quantized elements.
  void after_group(void* const (&x)[kArrays], int64_t group) {
    if constexpr (kDigest) {
      digest_ += digest_scales(x, group, place_factors<ScalarWords>(base_, number_));
    }
  }
  void add_to(ChunkTrace& trace) const {
    trace.lost += lost_;
    trace.digest += digest_ + registers_.total();
  }

 private:
  using Words = typename WordsOf<L>::type;
  template <class Lane>
  static int count(const Lane& /*lane*/) {
    return Lane::width;
  }
  static int count(const Part<L>& part) { return part.n; }

  int64_t origin_;
  Scalar* change_;
  int64_t begin_ = 0;
  uint32_t base_ = 0;
  uint32_t number_ = 0;
  int64_t lost_ = 0;
  uint64_t digest_ = 0;
  DigestRegisters<std::conditional_t<kDigest, Words, void>> registers_;
};

}  // namespace
}  // namespace torchopt_ext

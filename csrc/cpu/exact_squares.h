// Exact sums of squares of short rows, including 1-D tensors: docs/numerics.md section 3.
//
// Adding every element to the exact accumulator would take several times as long as reading it.
// Squares are therefore first summed in bins, which add up to 4,096 squares without rounding. The
// sum is exact, so the result does not depend on the order of additions.
#pragma once

#include <type_traits>

#include "cpu/fetch_ahead.h"
#include "kernels/bins.h"
#include "kernels/block_rule.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

namespace {

// The range of the magnitudes that are not zero. A NaN counts as larger than infinity.
struct MagnitudeRange {
  float smallest;
  float largest;  // 0 if all magnitudes are zero
};
template <class T>
inline MagnitudeRange magnitude_range(const T* x, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint16_t>;
  constexpr auto kAllBits = static_cast<Bits>(~Bits{0});
  constexpr auto kAllButSign = static_cast<Bits>(kAllBits >> 1);
  Bits largest = 0;
  Bits smallest_minus_one = kAllBits;  // of magnitude - 1: a zero wraps to kAllBits
  for (int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<Bits>(bit_cast<Bits>(x[i]) & kAllButSign);
    const auto minus_one = static_cast<Bits>(magnitude - 1);
    largest = magnitude > largest ? magnitude : largest;
    smallest_minus_one = minus_one < smallest_minus_one ? minus_one : smallest_minus_one;
  }
  const auto smallest = static_cast<Bits>(smallest_minus_one + 1);
  return {widen(bit_cast<T>(smallest)), widen(bit_cast<T>(largest))};
}

// Adds the squares of one register to the bins.
template <class L, int Bins>
inline void add_square(typename L::reg wide, typename L::reg (&sums)[Bins]) {
  const auto first = L::add_exact_square(sums[0], wide);
  auto rest = L::exact_square_minus(wide, L::sub(first, sums[0]));
  sums[0] = first;
#pragma GCC unroll 16
  for (int b = 1; b < Bins - 1; ++b) {
    const auto sum = L::add(sums[b], rest);
    rest = L::sub(rest, L::sub(sum, sums[b]));
    sums[b] = sum;
  }
  sums[Bins - 1] = L::add(sums[Bins - 1], rest);
}

// Adds the squares, which are below 2**(exponent + 1) and multiples of the last bin's unit. n is a
// multiple of the width. Prefetches as many bytes at `next`.
template <class L, int Bins, class T>
inline void add_squares_in_bins(const T* x, int64_t n, int exponent, const void* next,
                                ExactAccumulator& acc) {
  constexpr int64_t size = sizeof(T);
  // With 2 bins, even and odd registers have separate sums: an addition to the same sum would wait.
  typename L::reg even[Bins];
  typename L::reg odd[Bins];
  double bias[Bins];
  for (int b = 0; b < Bins; ++b) {
    bias[b] = bin_bias(exponent, b);
    even[b] = odd[b] = L::set1(bias[b]);
  }
  int64_t i = 0;
  for (; Bins == 2 && i + 2 * L::width <= n; i += 2 * L::width) {
    prefetch_lines<L>(next, size * i, 1);
    add_square<L>(L::load(x + i), even);
    add_square<L>(L::load(x + i + L::width), odd);
  }
  for (; i < n; i += L::width) {
    prefetch_lines<L>(next, size * i, 1);
    add_square<L>(L::load(x + i), even);
  }
  double lane[L::width];
  for (int b = 0; b < Bins; ++b) {
    const auto start = L::set1(bias[b]);
    L::store(lane, L::add(L::sub(even[b], start), L::sub(odd[b], start)));
    double total = 0.0;
    for (const double sum : lane) {
      total += sum;  // exact, like the differences above: below 2**52 units
    }
    accumulator_add(acc, total);
  }
}

// Adds the exact squares of at most 4,096 elements. `next`, which may be null, is what the caller
// reads soon. Prefetching it line by line during the additions, when memory would be idle, rather
// than at once takes a third off the time of pass A over 2,000 tensors of 1,000 elements.
template <class L, class T>
inline void add_exact_squares(const void* memory, int64_t n, const void* next,
                              ExactAccumulator& acc) {
  const auto* x = static_cast<const T*>(memory);
  int64_t vectorized = 0;
  if constexpr (L::width > 1 && sizeof(T) < sizeof(double)) {
    vectorized = n - n % L::width;
    const MagnitudeRange range = magnitude_range(x, vectorized);
    const void* const prefetch_from = next != nullptr ? next : x;  // x is in the cache already
    if (range.largest == 0.0f) {
      // all squares are zero
    } else if (!(range.largest <= 0x1.fffffep127f)) {
      vectorized = 0;  // infinities and NaNs are counted one by one
    } else {
      const int exponent = exponent_of(square(range.largest));
      // fp32 gradients within 2**16 of the largest take 2 bins, the whole range of fp32 takes 14.
      const int last_bit = 2 * last_bit_of<T>(range.smallest);
      if (last_bit >= bin_unit(exponent, 1)) {
        add_squares_in_bins<L, 2>(x, vectorized, exponent, prefetch_from, acc);
      } else if (last_bit >= bin_unit(exponent, 2)) {
        add_squares_in_bins<L, 3>(x, vectorized, exponent, prefetch_from, acc);
      } else {
        add_squares_in_bins<L, 14>(x, vectorized, exponent, prefetch_from, acc);
      }
    }
  }
  for (int64_t i = vectorized; i < n; ++i) {
    accumulator_add(acc, square(x[i]));
  }
}

}  // namespace
}  // namespace torchopt_ext

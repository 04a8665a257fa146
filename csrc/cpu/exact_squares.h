// Sums of squares of short rows, 1-D tensors included, which are exact: docs/numerics.md section 3.
//
// Adding every element to the exact accumulator would cost several times the memory traffic, so
// squares are first gathered in bins, where up to 4,096 of them add without rounding. The sum is
// exact, so its order does not show in the result.
#pragma once

#include <type_traits>

#include "cpu/fetch_ahead.h"
#include "kernels/bins.h"
#include "kernels/block_rule.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

namespace {

// The magnitudes that are not zero: from where to where they go; a NaN counts above infinity.
struct Magnitudes {
  float smallest;
  float largest;  // 0: all are zero
};
template <class T>
inline Magnitudes magnitudes(const T* x, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint16_t>;
  constexpr auto kAllBits = static_cast<Bits>(~Bits{0});
  constexpr auto kAllButSign = static_cast<Bits>(kAllBits >> 1);
  Bits largest = 0;
  Bits smallest_but_one = kAllBits;  // which a zero, less one, is as well
  for (int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<Bits>(bit_cast<Bits>(x[i]) & kAllButSign);
    const auto but_one = static_cast<Bits>(magnitude - 1);
    largest = magnitude > largest ? magnitude : largest;
    smallest_but_one = but_one < smallest_but_one ? but_one : smallest_but_one;
  }
  const auto smallest = static_cast<Bits>(smallest_but_one + 1);
  return {widen(bit_cast<T>(smallest)), widen(bit_cast<T>(largest))};
}

// Adds the square of one register to its bins.
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

// Adds the squares, all below 2**(exponent + 1) and multiples of the last of Bins bins' unit; n is
// a multiple of the width. Asks for as much at `next`.
template <class L, int Bins, class T>
inline void add_squares_in_bins(const T* x, int64_t n, int exponent, const void* next,
                                ExactAccumulator& acc) {
  constexpr int64_t size = sizeof(T);
  // With 2 bins, even and odd registers apart: one sum would wait for the other.
  typename L::reg even[Bins];
  typename L::reg odd[Bins];
  double bias[Bins];
  for (int b = 0; b < Bins; ++b) {
    bias[b] = bin_bias(exponent, b);
    even[b] = odd[b] = L::set1(bias[b]);
  }
  int64_t i = 0;
  for (; Bins == 2 && i + 2 * L::width <= n; i += 2 * L::width) {
    fetch_lines<L>(next, size * i, 1);
    add_square<L>(L::load(x + i), even);
    add_square<L>(L::load(x + i + L::width), odd);
  }
  for (; i < n; i += L::width) {
    fetch_lines<L>(next, size * i, 1);
    add_square<L>(L::load(x + i), even);
  }
  double lane[L::width];
  for (int b = 0; b < Bins; ++b) {
    const auto start = L::set1(bias[b]);
    L::store(lane, L::add(L::sub(even[b], start), L::sub(odd[b], start)));
    double total = 0.0;
    for (const double sum : lane) {
      total += sum;  // exact, as are the differences before: below 2**52 units
    }
    accumulator_add(acc, total);
  }
}

// Adds the exact square of each of at most 4,096 elements. `next`, which may be null, is what the
// caller will come to: memory would be idle while squares are added, and asking for it then, line
// by line rather than at once, spares pass A over 2,000 tensors of 1,000 a third of its time.
template <class L, class T>
inline void add_exact_squares(const void* memory, int64_t n, const void* next,
                              ExactAccumulator& acc) {
  const auto* x = static_cast<const T*>(memory);
  int64_t vectorised = 0;
  if constexpr (L::width > 1 && sizeof(T) < sizeof(double)) {
    vectorised = n - n % L::width;
    const Magnitudes range = magnitudes(x, vectorised);
    const void* const fetched = next != nullptr ? next : x;  // the latter is in the cache already
    if (range.largest == 0.0f) {
      // all squares are zero
    } else if (!(range.largest <= 0x1.fffffep127f)) {
      vectorised = 0;  // infinities and NaNs are counted one by one
    } else {
      const int exponent = exponent_of(square(range.largest));
      // fp32 gradients within 2**16 of the largest take 2 bins, all of fp32's take 14.
      const int last_bit = 2 * last_bit_of<T>(range.smallest);
      if (last_bit >= bin_unit(exponent, 1)) {
        add_squares_in_bins<L, 2>(x, vectorised, exponent, fetched, acc);
      } else if (last_bit >= bin_unit(exponent, 2)) {
        add_squares_in_bins<L, 3>(x, vectorised, exponent, fetched, acc);
      } else {
        add_squares_in_bins<L, 14>(x, vectorised, exponent, fetched, acc);
      }
    }
  }
  for (int64_t i = vectorised; i < n; ++i) {
    accumulator_add(acc, square(x[i]));
  }
}

}  // namespace
}  // namespace torchopt_ext

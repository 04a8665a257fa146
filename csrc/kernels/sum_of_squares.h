// Sum of squares of a gradient: docs/numerics.md section 3. Long rows are cut into blocks with a
// fixed lane map and a fixed fold; rows below 64 elements, 1-D tensors included, are summed
// exactly.
//
// 64 lanes are 8 AVX-512 or 16 AVX2 registers of doubles, and 2 lanes a thread of a CUDA warp.
// Adding every element of a short row to the exact accumulator would cost several times the memory
// traffic, so squares are first gathered in bins, where up to 4,096 of them add without rounding.
// Being exact, the way it is done does not show in the result.
#pragma once

#include "kernels/bins.h"
#include "kernels/block_rule.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

namespace {

// One block of at most 4,096 elements of a row. L is a lane type of doubles.
template <class L, class T>
inline double block_sum_of_squares(const T* x, int64_t n) {
  constexpr int kRegisters = kBlockLanes / L::width;
  typename L::reg sums[kRegisters];
  for (auto& sum : sums) {
    sum = L::set1(0.0);
  }
  int64_t i = 0;
  for (; i + kBlockLanes <= n; i += kBlockLanes) {
#pragma GCC unroll 16
    for (int r = 0; r < kRegisters; ++r) {
      typename L::reg wide;
      if constexpr (L::width == 1) {
        wide = static_cast<double>(widen(x[i + r]));
      } else {
        wide = L::load(x + i + r * L::width);
      }
      sums[r] = sizeof(T) < sizeof(double) ? L::add_exact_square(sums[r], wide)
                                           : L::add(sums[r], L::mul(wide, wide));
    }
  }
  double lane[kBlockLanes];
  for (int r = 0; r < kRegisters; ++r) {
    L::store(lane + r * L::width, sums[r]);
  }
  for (int j = 0; i < n; ++i, ++j) {
    lane[j] += square(x[i]);
  }
  for (int half = kBlockLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) {
      lane[j] += lane[j + half];
    }
  }
  return lane[0];
}

// The largest magnitude; a NaN counts above infinity.
inline float max_magnitude(const float* x, int64_t n) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    bits = magnitude > bits ? magnitude : bits;
  }
  return bit_cast<float>(bits);
}
template <class Half>
inline float max_magnitude(const Half* x, int64_t n) {
  uint16_t bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<uint16_t>(x[i].bits & 0x7fffu);
    bits = magnitude > bits ? magnitude : bits;
  }
  return widen(Half{bits});
}

// Adds the squares, all below 2**(exponent + 1), in Bins bins. Returns false, with nothing added,
// if a square has bits below the last bin's unit.
template <class L, int Bins, class T>
inline bool add_squares_in_bins(const T* x, int64_t n, int exponent, ExactAccumulator& acc) {
  typename L::reg sums[Bins];
  double bias[Bins];
  for (int b = 0; b < Bins; ++b) {
    bias[b] = bin_bias(exponent, b);
    sums[b] = L::set1(bias[b]);
  }
  typename L::reg left = L::set1(0.0);
  for (int64_t i = 0; i < n; i += L::width) {
    const auto wide = L::load(x + i);
    const auto first = L::add_exact_square(sums[0], wide);
    auto rest = L::exact_square_minus(wide, L::sub(first, sums[0]));
    sums[0] = first;
#pragma GCC unroll 16
    for (int b = 1; b < Bins; ++b) {
      const auto sum = L::add(sums[b], rest);
      rest = L::sub(rest, L::sub(sum, sums[b]));
      sums[b] = sum;
    }
    left = L::bit_or(left, rest);
  }
  double lane[L::width];
  L::store(lane, left);
  for (const double residual : lane) {
    if (residual != 0.0) {
      return false;
    }
  }
  for (int b = 0; b < Bins; ++b) {
    L::store(lane, sums[b]);
    double total = 0.0;
    for (const double sum : lane) {
      total += sum - bias[b];  // exact, as is the total: below 2**52 units
    }
    accumulator_add(acc, total);
  }
  return true;
}

template <class T>
inline void add_squares_one_by_one(const T* x, int64_t n, ExactAccumulator& acc) {
  for (int64_t i = 0; i < n; ++i) {
    accumulator_add(acc, square(x[i]));
  }
}

// Adds the exact square of each of at most 4,096 elements.
template <class L, class T>
inline void exact_sum_of_squares(const T* x, int64_t n, ExactAccumulator& acc) {
  int64_t vectorised = 0;
  if constexpr (L::width > 1 && sizeof(T) < sizeof(double)) {
    vectorised = n - n % L::width;
    const float largest = max_magnitude(x, vectorised);
    if (largest == 0.0f) {
      // all squares are zero
    } else if (!(largest <= 0x1.fffffep127f)) {
      vectorised = 0;  // infinities and NaNs are counted one by one
    } else {
      const int exponent = exponent_of(static_cast<double>(largest) * static_cast<double>(largest));
      // Squares have 48 bits: 2 bins hold gradients within 2**16 of the largest, 14 all of fp32's.
      if (!add_squares_in_bins<L, 2>(x, vectorised, exponent, acc) &&
          !add_squares_in_bins<L, 3>(x, vectorised, exponent, acc) &&
          !add_squares_in_bins<L, 14>(x, vectorised, exponent, acc)) {
        vectorised = 0;
      }
    }
  }
  add_squares_one_by_one(x + vectorised, n - vectorised, acc);
}

}  // namespace
}  // namespace torchopt_ext

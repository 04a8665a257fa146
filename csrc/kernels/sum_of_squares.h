// Sum of squares of a gradient: docs/numerics.md section 3. Long rows are cut into blocks with a
// fixed lane map and a fixed fold; rows below 64 elements, 1-D tensors included, are summed
// exactly.
//
// 64 lanes are 8 AVX-512 or 16 AVX2 registers of doubles, and 2 lanes a thread of a CUDA warp.
// Adding every element of a short row to the exact accumulator would cost several times the memory
// traffic, so squares are first extracted onto a fixed grid of bins (Demmel & Hida's and ReproBLAS'
// splitting, x + M - M with a large M), where up to 4,096 of them add without rounding. Being
// exact, the way it is done does not show in the result.
#pragma once

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
      sums[r] = L::add(sums[r], L::mul(wide, wide));
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

inline int exponent_of(double x) {
  return static_cast<int>((bit_cast<uint64_t>(x) >> 52) & 0x7ff) - 1023;
}
inline double power_of_two(int exponent) {
  return bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

inline constexpr int kBinBits = 40;  // 4,096 addends of 40 bits fit the 53 of a double

// Adds the squares, all below 2**(40 * (top_bin + 1)), in Bins bins from the top one down.
// Returns false, with nothing added, if a square has bits below the last bin.
template <class L, int Bins, class T>
inline bool add_squares_in_bins(const T* x, int64_t n, int top_bin, ExactAccumulator& acc) {
  typename L::reg magic[Bins];
  typename L::reg sums[Bins];
  for (int b = 0; b < Bins; ++b) {
    magic[b] = L::set1(1.5 * power_of_two(kBinBits * (top_bin - b) + 52));
    sums[b] = L::set1(0.0);
  }
  typename L::reg left = L::set1(0.0);  // sum of squared residuals: zero only if all are
  for (int64_t i = 0; i < n; i += L::width) {
    const auto wide = L::load(x + i);
    auto rest = L::mul(wide, wide);
#pragma GCC unroll 16
    for (int b = 0; b < Bins; ++b) {
      const auto high = L::sub(L::add(rest, magic[b]), magic[b]);
      rest = L::sub(rest, high);
      sums[b] = L::add(sums[b], high);
    }
    left = L::add(left, L::mul(rest, rest));
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
    double total = 0.0;  // at most 4,096 addends of 40 bits in all: still exact
    for (const double sum : lane) {
      total += sum;
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
      const int top_bin = (exponent + 16 * kBinBits) / kBinBits - 16;  // floor division
      // Squares have 48 bits: 3 bins hold gradients of usual spread, 16 all of fp32's range.
      if (!add_squares_in_bins<L, 3>(x, vectorised, top_bin, acc) &&
          !add_squares_in_bins<L, 6>(x, vectorised, top_bin, acc)) {
        add_squares_in_bins<L, 16>(x, vectorised, top_bin, acc);
      }
    }
  }
  add_squares_one_by_one(x + vectorised, n - vectorised, acc);
}

}  // namespace
}  // namespace torchopt_ext

// Sums of squares of long rows, in blocks with a fixed lane map and a fixed fold: docs/numerics.md
// section 3. 64 lanes are 8 AVX-512 or 16 AVX2 registers of doubles, or 2 lanes per thread of a
// CUDA warp.
#pragma once

#include <type_traits>

#include "cpu/fetch_ahead.h"
#include "kernels/block_rule.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

namespace {

// The prefetch distance within blocks, in bytes. Distances of 512 and 2,048 took 4 % longer.
inline constexpr int64_t kReadAheadBytes = 1024;

// Up to this many bytes in total, prefetching what follows the blocks gains more than within them.
inline constexpr int64_t kSmallBytes = 16384;

// Whether elements widen in pairs: even and odd bf16 elements go to separate registers and do not
// move between lanes. This takes 16 cycles for 64 elements instead of 20.
template <class L, class T>
inline constexpr bool kWidensInPairs = L::width > 1 && std::is_same_v<T, BFloat16>;

// Adds the square of one element to each lane.
template <class L, class T>
inline void add_lanes(const T* x, typename L::reg (&sums)[kBlockLanes / L::width]) {
  constexpr int kAtOnce = kWidensInPairs<L, T> ? 4 : 1;
#pragma GCC unroll 16
  for (int r = 0; r < kBlockLanes / L::width; r += kAtOnce) {
    typename L::reg wide[kAtOnce];
    if constexpr (kWidensInPairs<L, T>) {
      L::load_pairs(x + r * L::width, wide);
    } else {
      wide[0] = L::load(x + r * L::width);
    }
    for (int k = 0; k < kAtOnce; ++k) {
      sums[r + k] = sizeof(T) < sizeof(double) ? L::add_exact_square(sums[r + k], wide[k])
                                               : L::add(sums[r + k], L::mul(wide[k], wide[k]));
    }
  }
}

// Folds the lanes: lane j += lane j + half, for half = 32, 16, 8, 4, 2 and 1. With kInPairs the
// last fold adds the total of the odd lanes to the total of the even lanes.
template <class L, bool kInPairs>
inline double fold_lanes(typename L::reg (&sums)[kBlockLanes / L::width]) {
  constexpr int kLast = kInPairs ? 2 : 1;
  for (int half = kBlockLanes / L::width / 2; half >= kLast; half /= 2) {
    for (int r = 0; r < half; ++r) {
      sums[r] = L::add(sums[r], sums[r + half]);
    }
  }
  double total[kLast];
  for (int r = 0; r < kLast; ++r) {
    double lane[L::width];
    L::store(lane, sums[r]);
    for (int half = L::width / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) {
        lane[j] += lane[j + half];
      }
    }
    total[r] = lane[0];
  }
  return kInPairs ? total[0] + total[kLast - 1] : total[0];
}

// Sums the squares of blocks of n <= 4,096 elements each. L is a lane type of doubles. Prefetches
// as much at `ahead`.
template <class L, int kBlocks, class T>
inline void block_sums(const T* const (&block)[kBlocks], const void* const (&ahead)[kBlocks],
                       int64_t n, double (&totals)[kBlocks]) {
  constexpr int64_t size = sizeof(T);
  typename L::reg sums[kBlocks][kBlockLanes / L::width];
  for (auto& of_block : sums) {
    for (auto& sum : of_block) {
      sum = L::set1(0.0);
    }
  }
  int64_t i = 0;
  for (; i + kBlockLanes <= n; i += kBlockLanes) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      prefetch_lines<L, 2>(ahead[b], size * i, kBlockLanes * size);
      add_lanes<L>(block[b] + i, sums[b]);
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    if (i < n) {
      T rest[kBlockLanes] = {};  // lanes without an element add zero
      for (int64_t j = 0; i + j < n; ++j) {
        rest[j] = block[b][i + j];
      }
      add_lanes<L>(rest, sums[b]);
    }
    totals[b] = fold_lanes<L, kWidensInPairs<L, T>>(sums[b]);
  }
}

template <class L, class T>
inline double block_sum(const void* block, int64_t n) {
  double total[1];
  block_sums<L, 1, T>({static_cast<const T*>(block)}, {block}, n, total);
  return total[0];
}

// Adds the sums of blocks k, k + step, k + 2 step, ... of n elements. block(k) returns the address
// of block k. Prefetches what lies kReadAheadBytes bytes ahead, or `next` if it is not null.
template <class L, int kBlocks, class Block>
inline void add_block_group(const Block& block, int64_t k, int64_t step, int64_t n,
                            const void* next, ExactAccumulator& acc) {
  decltype(block(0)) at[kBlocks];
  const void* ahead[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    at[b] = block(k + b * step);
    ahead[b] = next == nullptr
                   ? reinterpret_cast<const char*>(at[b]) + kReadAheadBytes
                   : static_cast<const char*>(next) + b * n * static_cast<int64_t>(sizeof(*at[b]));
  }
  double totals[kBlocks];
  block_sums<L>(at, ahead, n, totals);
  for (const double total : totals) {
    accumulator_add(acc, total);
  }
}

// Adds the sums of `count` blocks, four at a time, a quarter of the blocks apart. To the hardware
// an array is one stream, and a thread reads four streams from memory 1.5 times as fast as one
// stream. On an Intel Xeon of 2023 bf16 gradients in memory take 0.85 of the time of a loop over
// single blocks, fp32 gradients 0.95. The last blocks of small tensors prefetch `next`, as does a
// single remaining block.
template <class L, class Block>
inline void add_blocks(const Block& block, int64_t count, int64_t n, const void* next,
                       ExactAccumulator& acc) {
  const int64_t quarter = count / 4;
  const bool is_small = count * n * static_cast<int64_t>(sizeof(*block(0))) <= kSmallBytes;
  const auto ahead_of = [&](bool is_last) { return is_small && is_last ? next : nullptr; };
  for (int64_t k = 0; k < quarter; ++k) {
    add_block_group<L, 4>(block, k, quarter, n, ahead_of(4 * (k + 1) == count), acc);
  }
  int64_t k = 4 * quarter;
  for (; k + 2 <= count; k += 2) {
    add_block_group<L, 2>(block, k, 1, n, ahead_of(k + 2 == count), acc);
  }
  if (k < count) {
    add_block_group<L, 1>(block, k, 1, n, next, acc);
  }
}

// Adds the block sums of rows of `length` elements. `next` is what is read after the rows, or null.
template <class L, class T>
inline void add_sums_of_rows(const void* memory, int64_t rows, int64_t length, const void* next,
                             ExactAccumulator& acc) {
  const auto* x = static_cast<const T*>(memory);
  const int64_t full = length / kBlockElements;
  const int64_t rest = length % kBlockElements;
  if (full > 0) {
    const auto block = [=](int64_t k) { return x + k / full * length + k % full * kBlockElements; };
    add_blocks<L>(block, rows * full, kBlockElements, next, acc);
  }
  if (rest > 0) {
    const auto block = [=](int64_t k) { return x + full * kBlockElements + k * length; };
    add_blocks<L>(block, rows, rest, next, acc);
  }
}

}  // namespace
}  // namespace torchopt_ext

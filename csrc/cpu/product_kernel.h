// Products of fp32 matrices. Each element is one chain of fused multiply-adds in the order of k,
// which goes on through memory where k is cut into panels. So the bits depend on no instruction
// set, tile, block or thread. (Panels, packing and register tiles as in Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication", 2008.) A CPU without FMA takes fmaf() of the
// C library: the same bits, slowly.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu/product.h"
#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

// The part of c that stays in registers: kRows rows by two registers of columns.
template <class L>
struct Tile {
  static constexpr int kRows = L::width == 16 ? 12 : L::width == 8 ? 6 : 4;
  static constexpr int kCols = 2 * L::width;
  static_assert(kRows <= kMaxTileRows && kBlockCols % kCols == 0 && kBlockCols % kRows == 0);
};

// to[j * ldt + i] = from[i * ldf + j]
inline void copy_transposed(const float* from, int64_t ldf, int64_t rows, int64_t cols, float* to,
                            int64_t ldt) {
  int64_t i = 0;
#ifdef __x86_64__
  for (; i + 4 <= rows; i += 4) {
    const float* x = from + i * ldf;
    int64_t j = 0;
    for (; j + 4 <= cols; j += 4) {
      __m128 a = _mm_loadu_ps(x + j);
      __m128 b = _mm_loadu_ps(x + ldf + j);
      __m128 c = _mm_loadu_ps(x + 2 * ldf + j);
      __m128 d = _mm_loadu_ps(x + 3 * ldf + j);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(to + j * ldt + i, a);
      _mm_storeu_ps(to + (j + 1) * ldt + i, b);
      _mm_storeu_ps(to + (j + 2) * ldt + i, c);
      _mm_storeu_ps(to + (j + 3) * ldt + i, d);
    }
    for (; j < cols; ++j) {
      for (int64_t r = 0; r < 4; ++r) {
        to[j * ldt + i + r] = x[r * ldf + j];
      }
    }
  }
#endif
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      to[j * ldt + i] = from[i * ldf + j];
    }
  }
}

// Sets to[k * kWidth + i] to element (first + i, first_k + k) of `x`, and to 0 for i >= width.
template <int kWidth>
inline void pack(const Operand& x, int64_t first, int64_t width, int64_t first_k, int64_t depth,
                 float* to) {
  if (width < kWidth) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t i = width; i < kWidth; ++i) {
        to[k * kWidth + i] = 0.0f;
      }
    }
  }
  if (!x.transposed) {
    copy_transposed(x.x + first * x.ld + first_k, x.ld, width, depth, to, kWidth);
    return;
  }
  // Rows are far apart, where the hardware prefetches nothing.
  constexpr int kAhead = 16;
  const float* from = x.x + first_k * x.ld + first;
  for (int64_t k = 0; k < depth; ++k, from += x.ld, to += kWidth) {
    __builtin_prefetch(from + kAhead * x.ld);
    if constexpr (kWidth > 16) {
      __builtin_prefetch(from + kAhead * x.ld + 16);
    }
    if (width == kWidth) {
      __builtin_memcpy(to, from, sizeof(float) * kWidth);
    } else {
      __builtin_memcpy(to, from, sizeof(float) * static_cast<size_t>(width));
    }
  }
}

// c[i][j] += sum over k of a[k][i] * b[k][j] for packed a and b; c starts at 0 if `is_first`. With
// an addend c becomes alpha * c + beta * addend at the end. Prefetches the next tile of c.
template <class L>
__attribute__((noinline)) void tile_product(const float* a, const float* b, int64_t depth,
                                            bool is_first, float* c, int64_t ldc,
                                            const float* addend, float alpha, float beta) {
  using R = typename L::reg;
  constexpr int kRows = Tile<L>::kRows;
  R sum[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = is_first ? R{} : L::load(c + i * ldc);
    sum[i][1] = is_first ? R{} : L::load(c + i * ldc + L::width);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    __builtin_prefetch(c + i * ldc + 2 * L::width, 1);
    __builtin_prefetch(c + i * ldc + 3 * L::width, 1);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const R b0 = L::load(b);
    const R b1 = L::load(b + L::width);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const R ai = L::set1(a[i]);
      sum[i][0] = L::fma(ai, b0, sum[i][0]);
      sum[i][1] = L::fma(ai, b1, sum[i][1]);
    }
    a += kRows;
    b += 2 * L::width;
  }
  // Or the compiler keeps the rows' addresses in registers and spills b1, for a third of the speed.
  asm("" : "+r"(c), "+r"(ldc));
  if (addend != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      for (int h = 0; h < 2; ++h) {
        const R other = L::mul(L::set1(beta), L::load(addend + i * ldc + h * L::width));
        sum[i][h] = L::fma(L::set1(alpha), sum[i][h], other);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    L::store(c + i * ldc, sum[i][0]);
    L::store(c + i * ldc + L::width, sum[i][1]);
  }
}

// The same for a tile of which only rows x cols elements exist.
template <class L>
inline void part_of_tile_product(const float* a, const float* b, int64_t depth, bool is_first,
                                 float* c, int64_t ldc, const float* addend, float alpha,
                                 float beta, int64_t rows, int64_t cols) {
  constexpr int64_t kCols = Tile<L>::kCols;
  alignas(64) float all[Tile<L>::kRows * kCols] = {};
  alignas(64) float others[Tile<L>::kRows * kCols] = {};
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(cols);
  for (int64_t i = 0; i < rows; ++i) {
    if (!is_first) {
      __builtin_memcpy(all + i * kCols, c + i * ldc, row_bytes);
    }
    if (addend != nullptr) {
      __builtin_memcpy(others + i * kCols, addend + i * ldc, row_bytes);
    }
  }
  tile_product<L>(a, b, depth, is_first, all, kCols, addend != nullptr ? others : nullptr, alpha,
                  beta);
  for (int64_t i = 0; i < rows; ++i) {
    __builtin_memcpy(c + i * ldc, all + i * kCols, row_bytes);
  }
}

// Copies the block's elements (i, j) with j > i to (j, i).
inline void mirror(const Product& p, const Block& block) {
  constexpr int64_t kSize = 32;
  for (int64_t i = block.first_row; i < block.last_row; i += kSize) {
    const int64_t last = i + kSize < block.last_row ? i + kSize : block.last_row;
    int64_t j = block.first_col;
    if (j <= i) {  // a block on the diagonal
      for (int64_t r = i; r < last; ++r) {
        for (j = r + 1; j < last; ++j) {
          p.c[j * p.ldc + r] = p.c[r * p.ldc + j];
        }
      }
      j = last;
    }
    for (; j < block.last_col; j += kSize) {
      const int64_t cols = block.last_col - j < kSize ? block.last_col - j : kSize;
      copy_transposed(p.c + i * p.ldc + j, p.ldc, last - i, cols, p.c + j * p.ldc + i, p.ldc);
    }
  }
}

template <class L>
void product(const Product& p, const Block& block, ProductScratch& scratch) {
  constexpr int64_t kRows = Tile<L>::kRows;
  constexpr int64_t kCols = Tile<L>::kCols;
  const Operand columns{p.b.x, p.b.ld, !p.b.transposed};
  for (int64_t k = 0; k < p.depth; k += kPanelDepth) {
    const bool is_last = p.depth - k <= kPanelDepth;
    const int64_t depth = is_last ? p.depth - k : kPanelDepth;
    const float* addend = is_last ? p.addend : nullptr;
    for (int64_t j = block.first_col; j < block.last_col; j += kCols) {
      const int64_t cols = block.last_col - j < kCols ? block.last_col - j : kCols;
      pack<kCols>(columns, j, cols, k, depth, scratch.b + (j - block.first_col) * depth);
    }
    for (int64_t i = block.first_row; i < block.last_row; i += kRows) {
      const int64_t rows = block.last_row - i < kRows ? block.last_row - i : kRows;
      pack<kRows>(p.a, i, rows, k, depth, scratch.a);
      int64_t j = block.first_col;
      if (p.symmetric && i > j) {
        j += (i - j) / kCols * kCols;  // the tiles before lie below the diagonal
      }
      for (; j < block.last_col; j += kCols) {
        const int64_t cols = block.last_col - j < kCols ? block.last_col - j : kCols;
        const float* b = scratch.b + (j - block.first_col) * depth;
        float* c = p.c + i * p.ldc + j;
        const float* other = addend != nullptr ? addend + i * p.ldc + j : nullptr;
        if (rows == kRows && cols == kCols) {
          tile_product<L>(scratch.a, b, depth, k == 0, c, p.ldc, other, p.alpha, p.beta);
        } else {
          part_of_tile_product<L>(scratch.a, b, depth, k == 0, c, p.ldc, other, p.alpha, p.beta,
                                  rows, cols);
        }
      }
    }
  }
  if (p.addend != nullptr) {
    for (int64_t i = block.first_row; i < block.last_row; ++i) {
      if (block.first_col <= i && i < block.last_col) {
        p.c[i * p.ldc + i] += p.diagonal;
      }
    }
  }
  if (p.symmetric) {
    mirror(p, block);
  }
}

// Rounds once to double and once to float, so that a factor outside of float's range is no problem.
inline void scale_by_double(float* to, const float* from, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<float>(static_cast<double>(from[i]) * factor);
  }
}

}  // namespace
}  // namespace torchopt_ext

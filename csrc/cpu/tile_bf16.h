// Tiles of 32 x 32 elements of bf16 in registers of AVX-512: transposed, and packed in pairs as
// products take them.
#pragma once

#include <immintrin.h>

#include "cpu/product_bf16.h"

namespace torchopt_ext {
namespace {

constexpr int64_t kTile = kBf16Tile;
constexpr int kHalf = 16;  // rows of an AMX tile, columns of a register

// Transposes 16 x 16 elements of 32 bits.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

// Pairs the elements 0 to 15, and 16 to 31, of two rows of 32.
inline void interleave(__m512i even, __m512i odd, __m512i& low, __m512i& high) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i index = _mm512_load_si512(kLow);
  low = _mm512_permutex2var_epi16(even, index, odd);
  high = _mm512_permutex2var_epi16(even, _mm512_add_epi16(index, _mm512_set1_epi16(16)), odd);
}

// Transposes 32 rows of 32 elements of 16 bits.
inline void transpose_tile(const __m512i (&rows)[kTile], __m512i (&to)[kTile]) {
  __m512i low[kHalf];
  __m512i high[kHalf];
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i) {
    interleave(rows[2 * i], rows[2 * i + 1], low[i], high[i]);
  }
  transpose(low);
  transpose(high);
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i) {
    to[i] = low[i];
    to[kHalf + i] = high[i];
  }
}

// Packs a tile of b in pairs of rows: element (k, column) goes to to[column / 16][k / 2], next to
// its neighbor in the other row. The rows of `from` are b's, or its columns if `transposed`.
inline void pack(const BFloat16* from, int64_t ld, bool transposed, __m512i* to) {
  if (!transposed) {
    for (int i = 0; i < kHalf; ++i, from += 2 * ld) {
      interleave(_mm512_load_si512(from), _mm512_load_si512(from + ld), to[i], to[kHalf + i]);
    }
    return;
  }
  for (int h = 0; h < 2; ++h, from += kHalf * ld, to += kHalf) {
    __m512i x[kHalf];
#pragma GCC unroll 16
    for (int i = 0; i < kHalf; ++i) {
      x[i] = _mm512_load_si512(from + i * ld);
    }
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < kHalf; ++i) {
      to[i] = x[i];
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

// 256-bit lanes. Compiled only in the AVX2 and AVX-512 builds of cpu/kernels.cpp.
#pragma once

#include <immintrin.h>

#include "cpu/lane_vector.h"

namespace torchopt_ext {
namespace {

// Convert eight 16-bit elements to float and back (see dtype.h).
inline __m256 widen8(const BFloat16* x) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 widen8(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline __m128i narrow8(__m256 a, BFloat16) {
  const __m256i halves = nearest_upper_half(_mm256_castps_si256(a));
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline __m128i narrow8(__m256 a, Float16) {
  return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Operations on registers of 32-bit words (kernels/stochastic.h).
struct Avx2Words : VectorWords<32> {
  // Operations on 16-bit words, for PairLane. Packing saturates.
  static reg load_halves(const int8_t* x) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static reg load_halves(const uint8_t* x) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  // Returns the lower halves. A tie (0x8000) above an even upper half becomes 0x7fff.
  static reg lowered_ties(reg high, reg low) {
    const reg tie = _mm256_cmpeq_epi16(low, halves(-0x8000));
    const reg above_even = bit_and(tie, sub_halves(bit_and(high, halves(1)), halves(1)));
    return add_halves(low, above_even);  // a mask of ones is minus one
  }
  // Returns the remainders `low` of the weights `high`, without those that join() ignores.
  static reg valid_remainders(reg high, reg low) {
    const reg zero = _mm256_cmpeq_epi16(add_halves(high, high), reg{});
    return _mm256_max_epi16(low, bit_and_not(zero, halves(-0x8000)));
  }
  static reg sub_saturated(reg a, reg b) { return _mm256_subs_epu16(a, b); }
  // Returns a / 256 for signed words, ties rounded up.
  static reg rounded_upper_bytes(reg a) { return _mm256_mulhrs_epi16(a, halves(32768 / 256)); }
  static reg unpack_low(reg low, reg high) { return _mm256_unpacklo_epi16(low, high); }
  static reg unpack_high(reg low, reg high) { return _mm256_unpackhi_epi16(low, high); }
  static reg packed(reg a, reg b) { return _mm256_packus_epi32(a, b); }
  static reg packed_signed(reg a, reg b) { return _mm256_packs_epi32(a, b); }
  // Sets `a` to the lower and `b` to the upper halves of both.
  static void split_halves(reg& a, reg& b) {
    const reg mask = set1(0xffff);
    const reg upper = packed(shifted(a, 16), shifted(b, 16));
    a = packed(bit_and(a, mask), bit_and(b, mask));
    b = upper;
  }
  static void store_bytes(int8_t* x, reg a) {  // the first and third quarter of the pack
    const reg all = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, a), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm256_castsi256_si128(all));
  }
  static void store_bytes(int8_t* x, reg a, reg b) { store_packed(x, _mm256_packs_epi16(a, b)); }
  static void store_bytes(uint8_t* x, reg a, reg b) { store_packed(x, _mm256_packus_epi16(a, b)); }
  // Stores bytes of at least -128 + `above`: subtracting saturates.
  static void store_bytes_above(int8_t* x, reg a, reg b, reg above_a, reg above_b) {
    const reg above = _mm256_packs_epi16(above_a, above_b);
    const reg bytes = _mm256_subs_epi8(_mm256_packs_epi16(a, b), above);
    store_packed(x, _mm256_adds_epi8(bytes, above));
  }
  static void store_packed(void* x, reg a) { store(x, _mm256_permute4x64_epi64(a, 0xd8)); }
  static reg max_halves(reg a, reg b) { return _mm256_max_epi16(a, b); }
  static int count_bytes(reg a) { return __builtin_popcount(_mm256_movemask_epi8(a)); }
  static reg multiples(uint32_t factor) {
    return multiply(_mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11), set1(factor));
  }
};

struct Avx2Float : VectorLaneOf<float, Avx2Words> {
  using VectorLaneOf<float, Avx2Words>::load;
  using VectorLaneOf<float, Avx2Words>::store;
  static __m256i mask_of_first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg load_part(const float* x, int n) { return _mm256_maskload_ps(x, mask_of_first(n)); }
  static void store_part(float* x, reg a, int n) { _mm256_maskstore_ps(x, mask_of_first(n), a); }
  static reg load(const BFloat16* x) { return widen8(x); }
  static reg load(const Float16* x) { return widen8(x); }
  template <class Half>
  static void store(Half* x, reg a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), narrow8(a, Half{}));
  }
  static void stream(float* x, reg a) { _mm256_stream_ps(x, a); }
  template <class Half>
  static void stream(Half* x, reg a) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(x), narrow8(a, Half{}));
  }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static bool all_at_most(reg a, reg b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) == 0;
  }
  static reg max_magnitude(reg a, reg b) {  // compares as integers: NaN is the largest
    return from_bits(_mm256_max_epu32(bits(a), bits(b)));
  }
  // Sets to[k] to the largest element of register k. Elements are magnitudes; NaN is the largest.
  static void largest(const reg (&from)[8], float* to) {
    const auto max = [](reg a, reg b) { return max_magnitude(a, b); };
    reg four[2];  // maxima of four registers each
    for (int k = 0; k < 2; ++k) {
      __m256d two[2];
      for (int j = 0; j < 2; ++j) {
        const reg a = from[2 * k + j];
        const reg b = from[2 * k + j + 4];
        two[j] = _mm256_castps_pd(
            max(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
      }
      four[k] = max(_mm256_castpd_ps(_mm256_unpacklo_pd(two[0], two[1])),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(two[0], two[1])));
    }
    store(to, max(_mm256_shuffle_ps(four[0], four[1], 0x88),
                  _mm256_shuffle_ps(four[0], four[1], 0xdd)));
  }

  // For PairLane: put two registers into its order of elements, or back into memory order.
  static void to_pair_order(reg& a, reg& b) {
    const reg first = a;
    a = _mm256_permute2f128_ps(first, b, 0x20);
    b = _mm256_permute2f128_ps(first, b, 0x31);
  }
  static void to_memory_order(reg& a, reg& b) { to_pair_order(a, b); }
  static __m256i rounded_words(reg a) { return _mm256_cvtps_epi32(a); }
  static __m256i truncated_words(reg a) { return _mm256_cvttps_epi32(a); }
};

struct Avx2Double : VectorLaneOf<double, Avx2Words> {
  using VectorLaneOf<double, Avx2Words>::load;
  static void stream(double* x, reg a) { _mm256_stream_pd(x, a); }
  static __m256i mask_of_first(int n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static reg load_part(const double* x, int n) { return _mm256_maskload_pd(x, mask_of_first(n)); }
  static void store_part(double* x, reg a, int n) { _mm256_maskstore_pd(x, mask_of_first(n), a); }
  static reg sqrt(reg a) { return _mm256_sqrt_pd(a); }
  static reg min(reg a, reg b) { return _mm256_min_pd(a, b); }
  // Returns sum + x*x. The square is exact, so the fused operation rounds like separate operations.
  static reg add_exact_square(reg sum, reg x) { return _mm256_fmadd_pd(x, x, sum); }
  static reg exact_square_minus(reg x, reg a) { return _mm256_fmsub_pd(x, x, a); }
  // Loads four elements of any type and converts them exactly.
  static reg load(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
  static reg load(const BFloat16* x) {
    const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
  }
  static reg load(const Float16* x) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  // Loads the even, then the odd elements of the first 8, then the same of the next 8.
  static void load_pairs(const BFloat16* x, reg (&to)[4]) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    const __m256 odd = _mm256_castsi256_ps(
        _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    to[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(even));
    to[1] = _mm256_cvtps_pd(_mm256_castps256_ps128(odd));
    to[2] = _mm256_cvtps_pd(_mm256_extractf128_ps(even, 1));
    to[3] = _mm256_cvtps_pd(_mm256_extractf128_ps(odd, 1));
  }
};

}  // namespace
}  // namespace torchopt_ext

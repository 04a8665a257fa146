// 512-bit lanes. Compiled only in the AVX-512 build of cpu/kernels.cpp. lane_avx2.h describes the
// functions.
#pragma once

#include <immintrin.h>

#include "cpu/lane_avx2.h"

namespace torchopt_ext {
namespace {

inline __m256i narrow16(__m512 a, BFloat16) {
  return _mm512_cvtepi32_epi16(nearest_upper_half(_mm512_castps_si512(a)));
}
inline __m256i narrow16(__m512 a, Float16) {
  return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

struct Avx512Words : VectorWords<64> {
  static reg load_halves(const int8_t* x) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static reg load_halves(const uint8_t* x) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static reg lowered_ties(reg high, reg low) {
    const __mmask32 tie = _mm512_cmpeq_epi16_mask(low, halves(-0x8000));
    const __mmask32 above_even = _mm512_mask_testn_epi16_mask(tie, high, halves(1));
    return _mm512_mask_mov_epi16(low, above_even, halves(0x7fff));
  }
  static reg valid_remainders(reg high, reg low) {
    const __mmask32 zero = _mm512_testn_epi16_mask(high, halves(0x7fff));
    return _mm512_mask_max_epi16(low, zero, low, reg{});
  }
  static reg sub_saturated(reg a, reg b) { return _mm512_subs_epu16(a, b); }
  static reg rounded_upper_bytes(reg a) {
    return _mm512_mulhrs_epi16(a, loaded_halves<32768 / 256>());
  }
  static reg unpack_low(reg low, reg high) { return _mm512_unpacklo_epi16(low, high); }
  static reg unpack_high(reg low, reg high) { return _mm512_unpackhi_epi16(low, high); }
  static reg packed(reg a, reg b) { return _mm512_packus_epi32(a, b); }
  static reg packed_signed(reg a, reg b) { return _mm512_packs_epi32(a, b); }
  static void split_halves(reg& a, reg& b) {  // four operations instead of six
    const reg order = _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100);
    const reg first = _mm512_shuffle_epi8(a, order);
    const reg second = _mm512_shuffle_epi8(b, order);
    a = _mm512_unpacklo_epi64(first, second);
    b = _mm512_unpackhi_epi64(first, second);
  }
  static void store_bytes(int8_t* x, reg a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtsepi16_epi8(a));
  }
  // Stores two registers at once: two operations instead of four.
  static void store_bytes(int8_t* x, reg a, reg b) { store_packed(x, _mm512_packs_epi16(a, b)); }
  static void store_bytes(uint8_t* x, reg a, reg b) { store_packed(x, _mm512_packus_epi16(a, b)); }
  static void store_bytes_above(int8_t* x, reg a, reg b, reg above_a, reg above_b) {
    const reg above = _mm512_packs_epi16(above_a, above_b);
    const reg bytes = _mm512_subs_epi8(_mm512_packs_epi16(a, b), above);
    store_packed(x, _mm512_adds_epi8(bytes, above));
  }
  static void store_packed(void* x, reg a) {
    store(x, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), a));
  }
  static reg max_halves(reg a, reg b) { return _mm512_max_epi16(a, b); }
  static int count_bytes(reg a) { return __builtin_popcountll(_mm512_movepi8_mask(a)); }
  static reg multiples(uint32_t factor) {
    return multiply(_mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                    set1(factor));
  }
};

struct Avx512Float : VectorLaneOf<float, Avx512Words> {
  using VectorLaneOf<float, Avx512Words>::load;
  using VectorLaneOf<float, Avx512Words>::store;
  static reg load_part(const float* x, int n) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
  }
  static void store_part(float* x, reg a, int n) {
    _mm512_mask_storeu_ps(x, static_cast<__mmask16>((1u << n) - 1), a);
  }
  static reg load(const BFloat16* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static reg load(const Float16* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  template <class Half>
  static void store(Half* x, reg a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), narrow16(a, Half{}));
  }
  static void stream(float* x, reg a) { _mm512_stream_ps(x, a); }
  template <class Half>
  static void stream(Half* x, reg a) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(x), narrow16(a, Half{}));
  }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
  static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
  static reg max_magnitude(reg a, reg b) { return from_bits(_mm512_max_epu32(bits(a), bits(b))); }
  // Returns the larger magnitude of two numbers. Of a NaN and a number it returns the number's.
  static reg max_of_numbers(reg a, reg b) { return _mm512_range_ps(a, b, 0x0b); }
  static bool all_at_most(reg a, reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) == 0; }
  static void largest(const reg (&from)[16], float* to) {
    const auto max = [](reg a, reg b) { return max_magnitude(a, b); };
    reg four[4];  // maxima of four registers each
    for (int k = 0; k < 4; ++k) {
      reg two[2];
      for (int j = 0; j < 2; ++j) {
        const reg a = from[k + 8 * j];
        const reg b = from[k + 8 * j + 4];
        two[j] = max(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
      }
      four[k] = max(_mm512_shuffle_f32x4(two[0], two[1], 0x88),
                    _mm512_shuffle_f32x4(two[0], two[1], 0xdd));
    }
    reg two[2];
    for (int k = 0; k < 2; ++k) {
      const __m512d a = _mm512_castps_pd(four[2 * k]);
      const __m512d b = _mm512_castps_pd(four[2 * k + 1]);
      two[k] = max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    store(to,
          max(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd)));
  }
  static reg canonical(reg a) {
    // Table digits by class: 0 (quiet and signaling NaN) gives the first operand, 1 gives `a`.
    return _mm512_fixupimm_ps(set1(canonical_nan(0.0f)), a, _mm512_set1_epi32(0x11111100), 0);
  }

  static void to_pair_order(reg& a, reg& b) {
    const reg first = a;
    a = _mm512_shuffle_f32x4(first, b, 0x88);
    b = _mm512_shuffle_f32x4(first, b, 0xdd);
  }
  static void to_memory_order(reg& a, reg& b) {
    const __m512d lower = _mm512_castps_pd(a);
    const __m512d upper = _mm512_castps_pd(b);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    a = _mm512_castpd_ps(_mm512_permutex2var_pd(lower, first, upper));
    b = _mm512_castpd_ps(_mm512_permutex2var_pd(lower, second, upper));
  }
  static __m512i rounded_words(reg a) { return _mm512_cvtps_epi32(a); }
  static __m512i truncated_words(reg a) { return _mm512_cvttps_epi32(a); }
};

struct Avx512Double : VectorLaneOf<double, Avx512Words> {
  using VectorLaneOf<double, Avx512Words>::load;
  static void stream(double* x, reg a) { _mm512_stream_pd(x, a); }
  static reg load_part(const double* x, int n) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), x);
  }
  static void store_part(double* x, reg a, int n) {
    _mm512_mask_storeu_pd(x, static_cast<__mmask8>((1u << n) - 1), a);
  }
  static reg sqrt(reg a) { return _mm512_sqrt_pd(a); }
  static reg min(reg a, reg b) { return _mm512_min_pd(a, b); }
  static reg add_exact_square(reg sum, reg x) { return _mm512_fmadd_pd(x, x, sum); }
  static reg exact_square_minus(reg x, reg a) { return _mm512_fmsub_pd(x, x, a); }
  static reg load(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
  static reg load(const BFloat16* x) { return _mm512_cvtps_pd(widen8(x)); }
  static reg load(const Float16* x) { return _mm512_cvtps_pd(widen8(x)); }
  static void load_pairs(const BFloat16* x, reg (&to)[4]) {
    const __m512i pairs = _mm512_loadu_si512(x);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 odd = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    to[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(even));
    to[1] = _mm512_cvtps_pd(_mm512_castps512_ps256(odd));
    to[2] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(even, 1));
    to[3] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(odd, 1));
  }
};

}  // namespace
}  // namespace torchopt_ext

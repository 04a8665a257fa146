// 256-bit lanes. Compiled only in the AVX2 build of cpu/kernels.cpp.
#pragma once

#include <immintrin.h>

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

struct Avx2Float {
  using scalar = float;
  using reg = __m256;
  static constexpr int width = 8;
  static reg load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, reg a) { _mm256_storeu_ps(x, a); }
  static reg set1(float a) { return _mm256_set1_ps(a); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static reg neg(reg a) { return _mm256_xor_ps(a, set1(-0.0f)); }
  static reg max_keep_nan(reg vmax, reg v) {
    const reg keep =
        _mm256_or_ps(_mm256_cmp_ps(vmax, v, _CMP_GT_OQ), _mm256_cmp_ps(vmax, vmax, _CMP_UNORD_Q));
    return _mm256_blendv_ps(v, vmax, keep);
  }
  static reg canonical(reg a) {
    return _mm256_blendv_ps(a, set1(canonical_nan(0.0f)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};

struct Avx2Double {
  using scalar = double;
  using reg = __m256d;
  static constexpr int width = 4;
  static reg load(const double* x) { return _mm256_loadu_pd(x); }
  static void store(double* x, reg a) { _mm256_storeu_pd(x, a); }
  static reg set1(double a) { return _mm256_set1_pd(a); }
  static reg add(reg a, reg b) { return _mm256_add_pd(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_pd(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_pd(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_pd(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_pd(a); }
  static reg min(reg a, reg b) { return _mm256_min_pd(a, b); }
  static reg neg(reg a) { return _mm256_xor_pd(a, set1(-0.0)); }
  static reg max_keep_nan(reg vmax, reg v) {
    const reg keep =
        _mm256_or_pd(_mm256_cmp_pd(vmax, v, _CMP_GT_OQ), _mm256_cmp_pd(vmax, vmax, _CMP_UNORD_Q));
    return _mm256_blendv_pd(v, vmax, keep);
  }
  static reg canonical(reg a) {
    return _mm256_blendv_pd(a, set1(canonical_nan(0.0)), _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
  }
  // Four elements of any type, converted exactly.
  static reg load(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
  static reg load(const BFloat16* x) {
    const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
  }
  static reg load(const Float16* x) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
};

// Eight 16-bit elements to float and back (see dtype.h).
inline __m256 widen8(const BFloat16* x) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 widen8(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline void narrow8(BFloat16* x, __m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(x),
      _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
inline void narrow8(Float16* x, __m256 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(x),
                   _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
}  // namespace torchopt_ext

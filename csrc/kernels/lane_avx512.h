// 512-bit lanes. Compiled only in the AVX-512 build of cpu/kernels.cpp.
#pragma once

#include <immintrin.h>

#include "kernels/lane_avx2.h"

namespace torchopt_ext {
namespace {

struct Avx512Float {
  using scalar = float;
  using reg = __m512;
  static constexpr int width = 16;
  static reg load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* x, reg a) { _mm512_storeu_ps(x, a); }
  static reg set1(float a) { return _mm512_set1_ps(a); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
  static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
  static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
  static reg neg(reg a) { return _mm512_xor_ps(a, set1(-0.0f)); }
  static reg max_keep_nan(reg vmax, reg v) {
    const __mmask16 keep =
        _mm512_cmp_ps_mask(vmax, v, _CMP_GT_OQ) | _mm512_cmp_ps_mask(vmax, vmax, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(keep, v, vmax);
  }
  static reg canonical(reg a) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a,
                                set1(canonical_nan(0.0f)));
  }
};

struct Avx512Double {
  using scalar = double;
  using reg = __m512d;
  static constexpr int width = 8;
  static reg load(const double* x) { return _mm512_loadu_pd(x); }
  static void store(double* x, reg a) { _mm512_storeu_pd(x, a); }
  static reg set1(double a) { return _mm512_set1_pd(a); }
  static reg add(reg a, reg b) { return _mm512_add_pd(a, b); }
  static reg sub(reg a, reg b) { return _mm512_sub_pd(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_pd(a, b); }
  static reg div(reg a, reg b) { return _mm512_div_pd(a, b); }
  static reg sqrt(reg a) { return _mm512_sqrt_pd(a); }
  static reg min(reg a, reg b) { return _mm512_min_pd(a, b); }
  static reg neg(reg a) { return _mm512_xor_pd(a, set1(-0.0)); }
  static reg max_keep_nan(reg vmax, reg v) {
    const __mmask8 keep =
        _mm512_cmp_pd_mask(vmax, v, _CMP_GT_OQ) | _mm512_cmp_pd_mask(vmax, vmax, _CMP_UNORD_Q);
    return _mm512_mask_blend_pd(keep, v, vmax);
  }
  static reg canonical(reg a) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q), a,
                                set1(canonical_nan(0.0)));
  }
  // Eight elements of any type, converted exactly.
  static reg load(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
  static reg load(const BFloat16* x) { return _mm512_cvtps_pd(widen8(x)); }
  static reg load(const Float16* x) { return _mm512_cvtps_pd(widen8(x)); }
};

}  // namespace
}  // namespace torchopt_ext

// 256-bit lanes. Compiled only in the AVX2 build of cpu/kernels.cpp.
#pragma once

#include <immintrin.h>

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

// Eight 16-bit elements to float and back (see dtype.h).
inline __m256 widen8(const BFloat16* x) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 widen8(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
// The low halves of eight 32-bit integers whose high halves are zero.
inline __m128i pack8(__m256i a) {
  return _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
inline __m256i nearest_upper_half(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))),
                           16);
}
inline __m128i narrow8(__m256 a, BFloat16) {
  return pack8(nearest_upper_half(_mm256_castps_si256(a)));
}
inline __m128i narrow8(__m256 a, Float16) {
  return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Words of 32 bits (kernels/stochastic.h, cpu/digest_words.h).
struct Avx2Words {
  using reg = __m256i;
  static constexpr int width = 8;
  static reg set1(uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
  static reg multiples(uint32_t factor) {
    return multiply(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), set1(factor));
  }
  static reg load(const uint32_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  static reg load(const uint8_t* x) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  }
  static reg load(const uint16_t* x) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static reg add(reg a, reg b) { return _mm256_add_epi32(a, b); }
  static reg bit_xor(reg a, reg b) { return _mm256_xor_si256(a, b); }
  static reg bit_or(reg a, reg b) { return _mm256_or_si256(a, b); }
  static reg multiply(reg a, reg b) { return _mm256_mullo_epi32(a, b); }
  template <int kBits>
  static reg shifted(reg a) {
    return _mm256_srli_epi32(a, kBits);
  }
  // Pairs of words as integers of 64 bits: sums, the products of lower words, upper words.
  static reg add_pairs(reg a, reg b) { return _mm256_add_epi64(a, b); }
  static reg multiply_lower(reg a, reg b) { return _mm256_mul_epu32(a, b); }
  static reg upper(reg a) { return _mm256_srli_epi64(a, 32); }
  static void store_pairs(uint64_t* x, reg a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), a);
  }
};

inline __m256i draw_of(const RandomWords<Avx2Words>& random, Array array) {
  const __m256i word = random.word[array / 2];
  return array % 2 == 0 ? _mm256_and_si256(word, _mm256_set1_epi32(0xffff))
                        : _mm256_srli_epi32(word, 16);
}

struct Avx2Float {
  using scalar = float;
  using reg = __m256;
  static constexpr int width = 8;
  static constexpr bool converts = true;
  static reg load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, reg a) { _mm256_storeu_ps(x, a); }
  // The first n elements, n < width; nothing beyond them is touched.
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg load_part(const float* x, int n) { return _mm256_maskload_ps(x, first(n)); }
  static void store_part(float* x, reg a, int n) { _mm256_maskstore_ps(x, first(n), a); }
  static reg set1(float a) { return _mm256_set1_ps(a); }
  static reg load(const BFloat16* x) { return widen8(x); }
  static reg load(const Float16* x) { return widen8(x); }
  template <class Half>
  static void store(Half* x, reg a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), narrow8(a, Half{}));
  }
  static reg load(const int8_t* x) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  static reg load(const uint8_t* x) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  // NaN converts to the least integer.
  static void store_codes(int8_t* x, reg code) {
    const __m256i bits = _mm256_cvtps_epi32(code);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(x), _mm_packs_epi16(words, words));
  }
  static void store_codes(uint8_t* x, reg code, reg root) {
    const __m256i positive =
        _mm256_castps_si256(_mm256_cmp_ps(root, _mm256_setzero_ps(), _CMP_GT_OQ));
    const __m256i bits =
        _mm256_max_epi32(_mm256_cvttps_epi32(code), _mm256_srli_epi32(positive, 31));
    const __m128i words = pack8(bits);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(x), _mm_packus_epi16(words, words));
  }
  static reg dithered(reg code, float limit, const RandomWords<Avx2Words>& random, Array array) {
    const reg draw = _mm256_mul_ps(_mm256_cvtepi32_ps(draw_of(random, array)), set1(0x1p-16f));
    return _mm256_floor_ps(_mm256_add_ps(_mm256_min_ps(set1(limit), code), draw));
  }
  static void stream(float* x, reg a) { _mm256_stream_ps(x, a); }
  template <class Half>
  static void stream(Half* x, reg a) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(x), narrow8(a, Half{}));
  }
  static reg joined(const BFloat16* weight, const int16_t* remainder) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(remainder));
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(widen8(weight)), _mm256_cvtepi16_epi32(low)));
  }
  static reg joined(const BFloat16* weight, const int8_t* remainder) {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(remainder));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(widen8(weight)),
                                                _mm256_slli_epi32(_mm256_cvtepi8_epi32(low), 8)));
  }
  static __m256i unnamed(__m256i bits) {
    return _mm256_cmpeq_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x1ffff)),
                              _mm256_set1_epi32(0x08000));
  }
  static void store_split(BFloat16* weight, int16_t* remainder, reg a) {
    __m256i bits = _mm256_castps_si256(a);
    bits = _mm256_add_epi32(bits, unnamed(bits));  // a mask of ones is minus one
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weight), pack8(nearest_upper_half(bits)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(remainder),
                     pack8(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff))));
  }
  static void store_split(BFloat16* weight, int8_t* remainder, reg a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i upper = nearest_upper_half(bits);
    const __m256i rest = _mm256_sub_epi32(bits, _mm256_slli_epi32(upper, 16));
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(rest, 8), one);
    const __m256i sum = _mm256_add_epi32(rest, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7f)));
    const __m256i lowest = _mm256_sub_epi32(_mm256_and_si256(upper, one), _mm256_set1_epi32(128));
    const __m256i low = _mm256_max_epi32(_mm256_srai_epi32(sum, 8), lowest);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weight), pack8(upper));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(remainder),
                     _mm_packs_epi16(words, words));  // at most 127
  }
  using Words = Avx2Words;
  using Random = RandomWords<Words>;
  static Random random(const RoundingStream& stream, uint32_t number) {
    return random_words<Words>(stream, number);
  }
  static void store_split_stochastic(BFloat16* weight, int8_t* remainder, reg a,
                                     const Random& random) {
    const __m256i draw = draw_of(random, kParam);
    const __m256i unit = _mm256_set1_epi32(0x100);
    __m256i bits =
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_and_si256(draw, _mm256_set1_epi32(0xff)));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(-0x100));
    // Up by one unit, or down.
    const __m256i change =
        _mm256_sub_epi32(_mm256_slli_epi32(_mm256_and_si256(draw, unit), 1), unit);
    bits = _mm256_add_epi32(bits, _mm256_and_si256(unnamed(bits), change));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weight), pack8(nearest_upper_half(bits)));
    const __m128i low = pack8(_mm256_srli_epi32(_mm256_slli_epi32(bits, 16), 24));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(remainder), _mm_packus_epi16(low, low));
  }
  static void store_stochastic(BFloat16* x, reg a, const Random& random, Array array) {
    const __m256i draw = draw_of(random, array);
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i rounds = _mm256_cmpgt_epi32(
        _mm256_set1_epi32(kLastBFloat16), _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_and_si256(draw, rounds));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), pack8(_mm256_srli_epi32(sum, 16)));
  }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static reg neg(reg a) { return _mm256_xor_ps(a, set1(-0.0f)); }
  static reg abs(reg a) { return _mm256_andnot_ps(set1(-0.0f), a); }
  static reg copy_sign(reg magnitude, reg sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(set1(-0.0f), sign));
  }
  static reg max_magnitude(reg most, reg a) {  // as integers, of which NaN's are the largest
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(most), _mm256_castps_si256(abs(a))));
  }
  static float largest(reg a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(_mm256_castps_si256(a)),
                                 _mm256_extracti128_si256(_mm256_castps_si256(a), 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(most));
  }
  static reg max_keep_nan(reg vmax, reg v) {
    const reg keep =
        _mm256_or_ps(_mm256_cmp_ps(vmax, v, _CMP_GT_OQ), _mm256_cmp_ps(vmax, vmax, _CMP_UNORD_Q));
    return _mm256_blendv_ps(v, vmax, keep);
  }
  static int count_lost(reg before, reg after, reg exp_avg, bool decays) {
    const reg zero = _mm256_setzero_ps();
    reg moves = _mm256_cmp_ps(exp_avg, zero, _CMP_NEQ_UQ);
    if (decays) {
      moves = _mm256_or_ps(moves, _mm256_cmp_ps(before, zero, _CMP_NEQ_UQ));
    }
    const reg lost = _mm256_and_ps(moves, _mm256_cmp_ps(after, before, _CMP_EQ_OQ));
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(lost)));
  }
  static reg canonical(reg a) {
    return _mm256_blendv_ps(a, set1(canonical_nan(0.0f)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};

struct Avx2Double {
  using scalar = double;
  using reg = __m256d;
  static constexpr int width = 4;
  static constexpr bool converts = false;
  static reg load(const double* x) { return _mm256_loadu_pd(x); }
  static void store(double* x, reg a) { _mm256_storeu_pd(x, a); }
  static void stream(double* x, reg a) { _mm256_stream_pd(x, a); }
  // The first n elements, n < width; nothing beyond them is touched.
  static __m256i first(int n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static reg load_part(const double* x, int n) { return _mm256_maskload_pd(x, first(n)); }
  static void store_part(double* x, reg a, int n) { _mm256_maskstore_pd(x, first(n), a); }
  static reg set1(double a) { return _mm256_set1_pd(a); }
  static reg add(reg a, reg b) { return _mm256_add_pd(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_pd(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_pd(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_pd(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_pd(a); }
  static reg min(reg a, reg b) { return _mm256_min_pd(a, b); }
  // sum + x*x for a square that is exact, where a fused operation rounds as separate ones do.
  static reg add_exact_square(reg sum, reg x) { return _mm256_fmadd_pd(x, x, sum); }
  static reg exact_square_minus(reg x, reg a) { return _mm256_fmsub_pd(x, x, a); }
  static reg neg(reg a) { return _mm256_xor_pd(a, set1(-0.0)); }
  static reg max_keep_nan(reg vmax, reg v) {
    const reg keep =
        _mm256_or_pd(_mm256_cmp_pd(vmax, v, _CMP_GT_OQ), _mm256_cmp_pd(vmax, vmax, _CMP_UNORD_Q));
    return _mm256_blendv_pd(v, vmax, keep);
  }
  static int count_lost(reg before, reg after, reg exp_avg, bool decays) {
    const reg zero = _mm256_setzero_pd();
    reg moves = _mm256_cmp_pd(exp_avg, zero, _CMP_NEQ_UQ);
    if (decays) {
      moves = _mm256_or_pd(moves, _mm256_cmp_pd(before, zero, _CMP_NEQ_UQ));
    }
    const reg lost = _mm256_and_pd(moves, _mm256_cmp_pd(after, before, _CMP_EQ_OQ));
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_pd(lost)));
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

}  // namespace
}  // namespace torchopt_ext

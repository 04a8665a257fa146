// The lane type: the only arithmetic that the formulas use. Every operation is correctly rounded
// and only fma() is fused, so the bits are the same on every instruction set. This header has the
// one-element lane for the host and for CUDA threads; lane_avx2.h, lane_avx512.h, pair_lane.h and
// cuda/vector_lane.h have lanes of several elements.
//
// A lane type offers, on a register of `width` elements, what its loops call of these functions:
// - All: load, store, stream, set1, set1_in_register, add, sub, mul, div, sqrt, neg, min,
//   max_keep_nan, canonical and count_lost.
// - Where `converts` is true: load, store and stream of 16-bit elements, rounded to nearest.
// - Where `has_narrow_types` is true: load_joined and store_split for weights with a remainder
//   (remainder.h); random, store_stochastic and store_split_stochastic (stochastic.h); and for
//   8-bit moments (quantize.h) load_code, store_codes, fraction, fma, abs, sub_bits, max_magnitude,
//   store_temporary and load_temporary. max_of_pair, max_of_numbers (where it is faster) and
//   SingleLane::largest find the largest magnitude of a group, and SingleLane::all_at_most tests
//   it.
// - Lanes of one register: load_part and store_part, for the last elements of an array.
// - Lanes of doubles, for sums of squares: load of every type, load_pairs, add_exact_square and
//   exact_square_minus.
#pragma once

#include "kernels/remainder.h"
#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

TORCHOPT_HD inline float canonical_nan(float) { return bit_cast<float>(0x7fc00000u); }
TORCHOPT_HD inline double canonical_nan(double) {
  return bit_cast<double>(static_cast<uint64_t>(0x7ff8000000000000u));
}

template <class T>
inline constexpr T largest_finite =
    static_cast<T>(sizeof(T) == sizeof(float) ? 0x1.fffffep127 : 0x1.fffffffffffffp1023);

template <class T>
struct ScalarLane {
  using SingleLane = ScalarLane;
  using scalar = T;
  using reg = T;
  using Words = ScalarWords;
  static constexpr int width = 1;
  static constexpr bool converts = sizeof(T) == sizeof(float);  // to and from 16-bit elements
  static constexpr bool has_narrow_types = converts;            // codes, remainders, random bits

  TORCHOPT_HD static T load(const T* x) { return *x; }
  TORCHOPT_HD static void store(T* x, T a) { *x = a; }
  // Load and store the first n elements, or all if n >= width (n < 32), and touch no other memory.
  TORCHOPT_HD static T load_part(const T* x, int /*n*/) { return *x; }
  TORCHOPT_HD static void store_part(T* x, T a, int /*n*/) { *x = a; }
  TORCHOPT_HD static T set1(T a) { return a; }
  // As set1, for the constants of a loop: x86 compilers would broadcast set1() again at each use.
  TORCHOPT_HD static T set1_in_register(T a) { return a; }
  // 16-bit elements (float lanes only).
  template <class Half>
  TORCHOPT_HD static T load(const Half* x) {
    return widen(*x);
  }
  template <class Half>
  TORCHOPT_HD static void store(Half* x, T a) {
    *x = narrow<Half>(a);
  }
  // Stores to an aligned address, past the caches where the instruction set has such a store.
  template <class Element>
  TORCHOPT_HD static void stream(Element* x, T a) {
    store(x, a);
  }
  template <class Remainder>
  TORCHOPT_HD static T load_joined(const BFloat16* weight, const Remainder* remainder) {
    return join(*weight, *remainder);
  }
  TORCHOPT_HD static void store_split(BFloat16* weight, int16_t* remainder, T a) {
    store_parts(weight, remainder, split(a));
  }
  TORCHOPT_HD static void store_split(BFloat16* weight, int8_t* remainder, T a) {
    store_parts(weight, remainder, split8(a));
  }
  TORCHOPT_HD static void store_split(BFloat16* weight, int8_t* remainder, T a, T b) {
    store_split(weight, remainder, a);
    store_split(weight + 1, remainder + 1, b);
  }
  using Random = RandomWords<Words>;
  TORCHOPT_HD static Random random(const RoundingStream& stream, uint32_t number) {
    return random_words<ScalarWords>(stream, number);
  }
  TORCHOPT_HD static void store_stochastic(BFloat16* x, T a, const Random& random, Array array) {
    *x = narrow_stochastic(a, random_bits_of(random, array));
  }
  TORCHOPT_HD static void store_split_stochastic(BFloat16* weight, int8_t* remainder, T a,
                                                 const Random& random) {
    store_parts(weight, remainder, split8_stochastic(a, random_bits_of(random, kParam)));
  }
  TORCHOPT_HD static T neg(T a) { return -a; }
  TORCHOPT_HD static T add_exact_square(T sum, T x) { return add(sum, mul(x, x)); }
  TORCHOPT_HD static T sub(T a, T b) { return add(a, -b); }
  // Returns b if either is a NaN.
  TORCHOPT_HD static T min(T a, T b) { return a < b ? a : b; }
  // Returns vmax unless v is larger or a NaN; a NaN in either is kept.
  TORCHOPT_HD static T max_keep_nan(T vmax, T v) { return vmax > v || vmax != vmax ? vmax : v; }
  // Counts elements that did not change although exp_avg, or with decay the weight, is not 0.
  TORCHOPT_HD static int count_lost(T before, T after, T exp_avg, bool decays) {
    const bool moves = (exp_avg != T{0}) | (decays & (before != T{0}));
    return static_cast<int>((after == before) & moves);
  }
  TORCHOPT_HD static T canonical(T a) { return a == a ? a : canonical_nan(a); }

  // The functions from here to store_codes() are for floats only.
  // Returns the number whose bits are the difference of the arguments' bits.
  TORCHOPT_HD static T sub_bits(T a, T b) {
    return bit_cast<T>(bit_cast<uint32_t>(a) - bit_cast<uint32_t>(b));
  }
  TORCHOPT_HD static T abs(T a) { return bit_cast<T>(bit_cast<uint32_t>(a) & 0x7fffffffu); }
  // Returns the larger of two magnitudes, or a NaN of either sign if either is a NaN.
  TORCHOPT_HD static T max_magnitude(T a, T b) {
    return bit_cast<uint32_t>(a) > bit_cast<uint32_t>(b) ? a : b;
  }
  // Returns whether a <= b in all elements.
  TORCHOPT_HD static bool all_at_most(T a, T b) { return a <= b; }
  // Help to find the largest element of a group: cpu/pair_lane.h, cpu/lane_avx512.h.
  TORCHOPT_HD static T max_of_pair(T a) { return a; }
  TORCHOPT_HD static void largest(const T (&from)[1], T* to) { *to = from[0]; }
  // Store and load temporary values, in an element order of the lane's own.
  TORCHOPT_HD static void store_temporary(T* x, T a) { *x = a; }
  TORCHOPT_HD static T load_temporary(const T* x) { return *x; }
  // Load codes as described at kExpAvgCodeUnit.
  TORCHOPT_HD static T load_code(const int8_t* x) { return static_cast<T>(*x * 65536); }
  TORCHOPT_HD static T load_code(const uint8_t* x) { return static_cast<T>(*x + 1); }
  // Returns an array's random bits as a number in [0, 1).
  TORCHOPT_HD static T fraction(const Random& random, Array array) {
    return mul(static_cast<T>(random_bits_of(random, array)), T{0x1p-16f});
  }
  // Stores codes (quantize.h) in [-128.5, 129), rounded to nearest even; NaN becomes -128.
  TORCHOPT_HD static void store_codes(int8_t* x, T code) {
    // For numbers below 2^22 this addition leaves the nearest integer in the lower bits.
    constexpr float kRounder = 0x1.8p23f;
    const auto bits = bit_cast<uint32_t>(add(code, T{kRounder})) - bit_cast<uint32_t>(kRounder);
    const auto nearest = static_cast<int32_t>(bits);
    *x = static_cast<int8_t>(code != code ? -128 : nearest > 127 ? 127 : nearest);
  }
  // Stores codes below 257, truncated; values below 1 and NaN become 0.
  TORCHOPT_HD static void store_codes(uint8_t* x, T code) {
    const int whole = code >= T{1} ? static_cast<int>(code) : 0;
    *x = static_cast<uint8_t>(whole > 255 ? 255 : whole);
  }
  template <class Code>
  TORCHOPT_HD static void store_codes(Code* x, T a, T b) {
    store_codes(x, a);
    store_codes(x + 1, b);
  }

#ifdef __CUDA_ARCH__
  // The intrinsics are never contracted, whatever the compiler's flags.
  __device__ static float add(float a, float b) { return __fadd_rn(a, b); }
  __device__ static float mul(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  __device__ static float div(float a, float b) { return __fdiv_rn(a, b); }
  __device__ static float sqrt(float a) { return __fsqrt_rn(a); }
  __device__ static double add(double a, double b) { return __dadd_rn(a, b); }
  __device__ static double mul(double a, double b) { return __dmul_rn(a, b); }
  __device__ static double div(double a, double b) { return __ddiv_rn(a, b); }
  __device__ static double sqrt(double a) { return __dsqrt_rn(a); }
#else
  TORCHOPT_HD static T add(T a, T b) { return a + b; }
  TORCHOPT_HD static T mul(T a, T b) { return a * b; }
  TORCHOPT_HD static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  TORCHOPT_HD static T div(T a, T b) { return a / b; }
  TORCHOPT_HD static float sqrt(float a) { return __builtin_sqrtf(a); }
  TORCHOPT_HD static double sqrt(double a) { return __builtin_sqrt(a); }
#endif

 private:
  template <class Remainder>
  TORCHOPT_HD static void store_parts(BFloat16* weight, Remainder* remainder,
                                      const SplitFloat<Remainder>& parts) {
    *weight = parts.weight;
    *remainder = parts.remainder;
  }
};

}  // namespace
}  // namespace torchopt_ext

// The common part of the x86 lanes, in the compiler's vector types.
#pragma once

#include <immintrin.h>

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

template <class T, int kBytes>
struct VectorType {
  using type __attribute__((vector_size(kBytes))) = T;
};
template <class T, int kBytes>
using VectorOf = typename VectorType<T, kBytes>::type;

template <class V>
inline V load_vector(const void* x) {
  V a;
  __builtin_memcpy(&a, x, sizeof(a));
  return a;
}
template <class V>
inline void store_vector(void* x, V a) {
  __builtin_memcpy(x, &a, sizeof(a));
}

// Operations on registers of 32-bit words (kernels/stochastic.h).
template <int kBytes>
struct VectorWords {
  using reg = VectorOf<long long, kBytes>;  // __m256i or __m512i
  using Word = VectorOf<uint32_t, kBytes>;
  using Half = VectorOf<uint16_t, kBytes>;  // unsigned: sums may wrap
  static constexpr int bytes = kBytes;
  static constexpr int width = kBytes / 4;
  static reg set1(uint32_t a) { return bit_cast<reg>(a - Word{}); }
  static reg load(const void* x) { return load_vector<reg>(x); }
  static void store(void* x, reg a) { store_vector(x, a); }
  static reg add(reg a, reg b) { return bit_cast<reg>(bit_cast<Word>(a) + bit_cast<Word>(b)); }
  static reg bit_xor(reg a, reg b) { return a ^ b; }
  static reg bit_or(reg a, reg b) { return a | b; }
  static reg bit_and(reg a, reg b) { return a & b; }
  static reg bit_and_not(reg a, reg b) { return ~a & b; }
  static reg multiply(reg a, reg b) { return bit_cast<reg>(bit_cast<Word>(a) * bit_cast<Word>(b)); }
  static reg shifted(reg a, int bits) { return bit_cast<reg>(bit_cast<Word>(a) >> bits); }

  // Operations on 16-bit words, for PairLane.
  static reg halves(int16_t a) { return bit_cast<reg>(static_cast<uint16_t>(a) - Half{}); }
  // As halves(), which compilers broadcast at each use where registers are short. A load takes none
  // of the units that compute.
  template <uint16_t kValue>
  static reg loaded_halves() {
    static constexpr uint32_t kPair = kValue * 0x10001u;
    reg a;
    asm("vpbroadcastd %1, %0" : "=v"(a) : "m"(kPair));
    return a;
  }
  static reg add_halves(reg a, reg b) {
    return bit_cast<reg>(bit_cast<Half>(a) + bit_cast<Half>(b));
  }
  static reg sub_halves(reg a, reg b) {
    return bit_cast<reg>(bit_cast<Half>(a) - bit_cast<Half>(b));
  }
  static reg sign_halves(reg a) {
    return bit_cast<reg>(bit_cast<VectorOf<int16_t, kBytes>>(a) >> 15);
  }
  static reg shifted_halves(reg a, int bits) { return bit_cast<reg>(bit_cast<Half>(a) >> bits); }
  static reg left_halves(reg a, int bits) { return bit_cast<reg>(bit_cast<Half>(a) << bits); }
};

template <class V>  // __m256i or __m512i
inline V nearest_upper_half(V a) {
  const auto bits = bit_cast<VectorOf<uint32_t, sizeof(V)>>(a);
  return bit_cast<V>((bits + (bits >> 16 & 1u) + 0x7fffu) >> 16);
}

template <class T, class W>
struct VectorLaneOf {
  using scalar = T;
  using reg = VectorOf<T, W::bytes>;
  using Words = W;
  using Word = typename W::reg;
  using Bits = VectorOf<uint32_t, W::bytes>;
  static constexpr int width = W::bytes / sizeof(T);
  static constexpr bool converts = sizeof(T) == sizeof(float);
  static constexpr bool has_narrow_types = false;
  static reg load(const T* x) { return load_vector<reg>(x); }
  static void store(T* x, reg a) { store_vector(x, a); }
  static reg set1(T a) { return a - reg{}; }  // an addition would lose -0
  static reg set1_in_register(T a) {
    reg all = set1(a);
    asm("" : "+v"(all));
    return all;
  }
  static reg add(reg a, reg b) { return a + b; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg div(reg a, reg b) { return a / b; }
  static reg neg(reg a) { return -a; }
  static reg max_keep_nan(reg vmax, reg v) { return ((vmax > v) | (vmax != vmax)) ? vmax : v; }
  static reg canonical(reg a) { return a == a ? a : set1(canonical_nan(T{})); }
  static int count_lost(reg before, reg after, reg exp_avg, bool decays) {
    auto moves = exp_avg != reg{};
    if (decays) {
      moves |= before != reg{};
    }
    return W::count_bytes(bit_cast<Word>(moves & (after == before))) / static_cast<int>(sizeof(T));
  }

  // The functions below are for floats only.
  static Word bits(reg a) { return bit_cast<Word>(a); }
  static reg from_bits(Word a) { return bit_cast<reg>(a); }
  static reg from_words(Word a) {
    return __builtin_convertvector(bit_cast<VectorOf<int, W::bytes>>(a), reg);
  }
  static reg abs(reg a) { return bit_cast<reg>(bit_cast<Bits>(a) & 0x7fffffffu); }
  static reg sub_bits(reg a, reg b) { return bit_cast<reg>(bit_cast<Bits>(a) - bit_cast<Bits>(b)); }
};

}  // namespace
}  // namespace torchopt_ext

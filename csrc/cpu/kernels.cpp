// Compiled once per instruction set, without torch; the compiler's flags choose the lanes and
// TORCHOPT_KERNELS names the getter. Everything else stays in anonymous namespaces
// (kernels/host_device.h).
#include <type_traits>

#include "cpu/kernel_table.h"
#include "kernels/digest.h"
#include "kernels/scaled_copy.h"
#include "kernels/sum_of_squares.h"
#if defined(__AVX512F__)
#include "kernels/lane_avx512.h"
#elif defined(__AVX2__)
#include "kernels/lane_avx2.h"
#endif

namespace torchopt_ext {
namespace {

#if defined(__AVX512F__)
constexpr const char* kName = "avx512";
using FloatLane = Avx512Float;
using DoubleLane = Avx512Double;
#elif defined(__AVX2__)
constexpr const char* kName = "avx2";
using FloatLane = Avx2Float;
using DoubleLane = Avx2Double;
#else
constexpr const char* kName = "default";
using FloatLane = ScalarLane<float>;
using DoubleLane = ScalarLane<double>;
#endif

template <class L, class T = typename L::scalar>
void adam(const AdamScalars<T>& scalars, T* __restrict param, const T* __restrict grad,
          T* __restrict exp_avg, T* __restrict exp_avg_sq, T* __restrict max_exp_avg_sq,
          int64_t n) {
  const AdamScalars<T> s = scalars;
  int64_t i = 0;
  for (; i + L::width <= n; i += L::width) {
    adam_update<L>(s, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                   max_exp_avg_sq != nullptr ? max_exp_avg_sq + i : nullptr);
  }
  if (i == n) {
    return;
  }
  // What is left, in one register: a small tensor would spend much on single elements' roots and
  // divisions.
  if constexpr (L::width > 1) {
    const auto left = static_cast<int>(n - i);
    const bool amsgrad = max_exp_avg_sq != nullptr;
    auto p = L::load_part(param + i, left);
    auto m = L::load_part(exp_avg + i, left);
    auto v = L::load_part(exp_avg_sq + i, left);
    auto vmax = amsgrad ? L::load_part(max_exp_avg_sq + i, left) : L::set1(0);
    adam_registers<L>(s, p, L::load_part(grad + i, left), m, v, amsgrad ? &vmax : nullptr);
    L::store_part(param + i, p, left);
    L::store_part(exp_avg + i, m, left);
    L::store_part(exp_avg_sq + i, v, left);
    if (amsgrad) {
      L::store_part(max_exp_avg_sq + i, vmax, left);
    }
  }
}

template <class T>
double block_sum(const void* x, int64_t n) {
  return block_sum_of_squares<DoubleLane>(static_cast<const T*>(x), n);
}

template <class T>
void exact_sum(const void* x, int64_t n, ExactAccumulator& acc) {
  exact_sum_of_squares<DoubleLane>(static_cast<const T*>(x), n, acc);
}

// Inlined into every caller: where types are constants, the branches on them go.
[[gnu::always_inline]] inline void adam_loop(const AdamScalars<float>& scalars, AdamStreams x,
                                             int64_t n) {
  const AdamScalars<float> s = scalars;
  // The parameter beside a master weight is written and not read, and nothing else would bring its
  // lines in before a store waits for them. (Stores past the caches were slower.)
  const bool write_only = x.weights == Weights::kMaster;
  const auto* ahead = static_cast<const char*>(x.param) + 1024;
  int64_t i = 0;
  for (; i + FloatLane::width <= n; i += FloatLane::width) {
    if (write_only) {
      __builtin_prefetch(ahead + 2 * i);
    }
    adam_streams<FloatLane>(s, x, i);
  }
  for (; i < n; ++i) {
    adam_streams<ScalarLane<float>>(s, x, i);
  }
}

// Any types, and without branches on them those that large models are trained in.
[[gnu::flatten]] void adam_any(const AdamScalars<float>& scalars, const AdamStreams& streams,
                               int64_t n) {
  AdamStreams x = streams;
  const bool usual = x.param_dtype == DType::kBFloat16 && x.grad_dtype == DType::kBFloat16 &&
                     x.state_dtype == DType::kFloat32 && x.random == nullptr &&
                     x.max_exp_avg_sq == nullptr;
  if (!usual || x.weights == Weights::kPlain) {
    adam_loop(scalars, x, n);
    return;
  }
  x.param_dtype = x.grad_dtype = DType::kBFloat16;
  x.state_dtype = DType::kFloat32;
  x.random = nullptr;
  x.max_exp_avg_sq = nullptr;
  if (streams.weights == Weights::kMaster) {
    x.weights = Weights::kMaster;
    adam_loop(scalars, x, n);
  } else {
    x.weights = Weights::kRemainder;
    adam_loop(scalars, x, n);
  }
}

void load_weights(const AdamStreams& x, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + FloatLane::width <= n; i += FloatLane::width) {
    FloatLane::store(to + i, load_weight<FloatLane>(x, i));
  }
  for (; i < n; ++i) {
    to[i] = load_weight<ScalarLane<float>>(x, i);
  }
}

// 32 elements at a time, whose blocks' numbers share their upper half.
#if defined(__AVX512F__)
int64_t random_bits_fast(const RoundingKey& key, uint64_t first, uint64_t* to, int64_t n) {
  const __m512i kLanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto multiply = [](__m512i x, uint32_t factor, __m512i& high) {
    const __m512i f = _mm512_set1_epi64(factor);
    const __m512i even = _mm512_mul_epu32(x, f);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), f);
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    return _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  };
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint64_t block = (first + static_cast<uint64_t>(i)) / 2;
    if ((block & 0xffffffffu) > 0xffffffffu - 16) {
      break;
    }
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(block)), kLanes);
    __m512i c1 = _mm512_set1_epi32(static_cast<int>(block >> 32));
    __m512i c2 = _mm512_set1_epi32(static_cast<int>(key.step));
    __m512i c3 = _mm512_set1_epi32(static_cast<int>(key.parameter));
    auto k0 = static_cast<uint32_t>(key.seed);
    auto k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      __m512i high0;
      __m512i high2;
      const __m512i low0 = multiply(c0, 0xd2511f53u, high0);
      const __m512i low2 = multiply(c2, 0xcd9e8d57u, high2);
      c0 = _mm512_xor_si512(_mm512_xor_si512(high2, c1), _mm512_set1_epi32(static_cast<int>(k0)));
      c2 = _mm512_xor_si512(_mm512_xor_si512(high0, c3), _mm512_set1_epi32(static_cast<int>(k1)));
      c1 = low2;
      c3 = low0;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    // Lane 4q + j has block 4j + q, so that transposing quarters leaves the blocks in order.
    const __m512i a = _mm512_unpacklo_epi32(c0, c1);
    const __m512i b = _mm512_unpackhi_epi32(c0, c1);
    const __m512i c = _mm512_unpacklo_epi32(c2, c3);
    const __m512i d = _mm512_unpackhi_epi32(c2, c3);
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(to + i + 8, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(to + i + 16, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(to + i + 24, _mm512_unpackhi_epi64(b, d));
  }
  return i;
}
#else
int64_t random_bits_fast(const RoundingKey&, uint64_t, uint64_t*, int64_t) { return 0; }
#endif

void random_bits(const RoundingKey& key, int64_t first_element, uint64_t* to, int64_t n) {
  const auto first = static_cast<uint64_t>(first_element);
  int64_t i = 0;
  if (n > 0 && first % 2 == 1) {
    to[i++] = random_of(key, first);
  }
  i += random_bits_fast(key, first + static_cast<uint64_t>(i), to + i, n - i);
  for (; i + 2 <= n; i += 2) {
    const PhiloxBlock block = philox(key, (first + static_cast<uint64_t>(i)) / 2);
    to[i] = random_of(block, false);
    to[i + 1] = random_of(block, true);
  }
  if (i < n) {
    to[i] = random_of(key, first + static_cast<uint64_t>(i));
  }
}

template <class To, class From>
void scaled_copy(void* to_memory, const void* from_memory, double factor, int64_t n,
                 bool past_caches) {
  using L = std::conditional_t<std::is_same_v<To, double>, DoubleLane, FloatLane>;
  using Scalar = ScalarLane<typename L::scalar>;
  const auto rounded = static_cast<typename L::scalar>(factor);
  auto* to = static_cast<To*>(to_memory);
  const auto* from = static_cast<const From*>(from_memory);
  int64_t i = 0;
  if (past_caches && reinterpret_cast<uintptr_t>(to) % (L::width * sizeof(To)) == 0) {
    for (; i + L::width <= n; i += L::width) {
      L::stream(to + i, scaled<L>(L::load(from + i), rounded));
    }
  }
  for (; i + L::width <= n; i += L::width) {
    L::store(to + i, scaled<L>(L::load(from + i), rounded));
  }
  for (; i < n; ++i) {
    Scalar::store(to + i, scaled<Scalar>(Scalar::load(from + i), rounded));
  }
}

template <class T>
void difference(const T* before, const T* after, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = after[i] - before[i];
  }
}

template <class T, class M>
int64_t count_lost(const T* __restrict before, const T* __restrict after, const void* exp_avg,
                   int64_t n, bool decays) {
  const auto* __restrict m = static_cast<const M*>(exp_avg);
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool moves = (widen(m[i]) != 0) | (decays & (before[i] != T{0}));
    count += static_cast<int32_t>((after[i] == before[i]) & moves);
  }
  return count;
}

template <class Bits>
uint64_t digest(const void* x, uint32_t salt, int64_t first_element, int64_t n) {
  const auto* bits = static_cast<const Bits*>(x);
  uint64_t sum = 0;
  for (int64_t i = 0; i < n;) {
    const auto element = static_cast<uint64_t>(first_element + i);
    const int64_t same_high = (int64_t{1} << 32) - static_cast<int64_t>(element & 0xffffffffu);
    const int64_t length = same_high < n - i ? same_high : n - i;
    sum += digest_run(salt, element, bits + i, length);
    i += length;
  }
  return sum;
}

}  // namespace

const KernelTable& TORCHOPT_KERNELS() {
  static constexpr KernelTable table = {
      .name = kName,
      .adam_float = adam<FloatLane>,
      .adam_streams = adam_any,
      .adam_double = adam<DoubleLane>,
      // In the order of DType.
      .block_sum_of_squares = {block_sum<float>, block_sum<double>, block_sum<BFloat16>,
                               block_sum<Float16>},
      .exact_sum_of_squares = {exact_sum<float>, exact_sum<double>, exact_sum<BFloat16>,
                               exact_sum<Float16>},
      .load_weights = load_weights,
      .random_bits = random_bits,
      .scaled_copy = {{scaled_copy<float, float>, nullptr, scaled_copy<float, BFloat16>,
                       scaled_copy<float, Float16>},
                      {nullptr, scaled_copy<double, double>, nullptr, nullptr},
                      {scaled_copy<BFloat16, float>, nullptr, scaled_copy<BFloat16, BFloat16>,
                       scaled_copy<BFloat16, Float16>},
                      {scaled_copy<Float16, float>, nullptr, scaled_copy<Float16, BFloat16>,
                       scaled_copy<Float16, Float16>}},
      .difference_float = difference<float>,
      .difference_double = difference<double>,
      .count_lost_float = {count_lost<float, float>, nullptr, count_lost<float, BFloat16>,
                           count_lost<float, Float16>},
      .count_lost_double = count_lost<double, double>,
      .digest = {nullptr, digest<uint16_t>, digest<uint32_t>, digest<uint64_t>},
  };
  return table;
}

}  // namespace torchopt_ext

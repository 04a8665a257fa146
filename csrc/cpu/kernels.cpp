// Compiled once per instruction set, without torch; the compiler's flags choose the lanes and
// TORCHOPT_KERNELS names the getter. Everything else stays in anonymous namespaces
// (kernels/host_device.h).
#include <type_traits>

#include "cpu/digest_words.h"
#include "cpu/fetch_ahead.h"
#include "cpu/kernel_table.h"
#include "cpu/random_bits.h"
#include "cpu/sum_of_squares.h"
#include "kernels/scaled_copy.h"
#if defined(__AVX512F__)
#include "cpu/lane_avx512.h"
#elif defined(__AVX2__)
#include "cpu/lane_avx2.h"
#endif

namespace torchopt_ext {
namespace {

#if defined(__AVX512F__)
constexpr const char* kName = "avx512";
using FloatLane = Avx512Float;
using DoubleLane = Avx512Double;
using Integers = Avx512Integers;
#elif defined(__AVX2__)
constexpr const char* kName = "avx2";
using FloatLane = Avx2Float;
using DoubleLane = Avx2Double;
using Integers = Avx2Integers;
#else
constexpr const char* kName = "default";
using FloatLane = ScalarLane<float>;
using DoubleLane = ScalarLane<double>;
using Integers = void;
#endif

template <class L, class T = typename L::scalar>
void adam(const AdamScalars<T>& scalars, T* __restrict param, const T* __restrict grad,
          T* __restrict exp_avg, T* __restrict exp_avg_sq, T* __restrict max_exp_avg_sq,
          int64_t n) {
  const AdamScalars<T> s = scalars;
  int64_t i = 0;
  for (; i + L::width <= n; i += L::width) {
    const auto at = static_cast<int64_t>(sizeof(T)) * i;
    fetch_ahead<L>(param, at);
    fetch_ahead<L>(grad, at);
    fetch_ahead<L>(exp_avg, at);
    fetch_ahead<L>(exp_avg_sq, at);
    if (max_exp_avg_sq != nullptr) {
      fetch_ahead<L>(max_exp_avg_sq, at);
    }
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
void exact_sum(const void* x, int64_t n, const void* next, ExactAccumulator& acc) {
  exact_sum_of_squares<DoubleLane>(static_cast<const T*>(x), n, next, acc);
}

// Asks for what a loop over the streams comes to after element i.
[[gnu::always_inline]] inline void fetch_streams_ahead(const AdamStreams& x, int64_t i) {
  using L = FloatLane;
  if (!x.param_past_caches) {
    fetch_ahead<L>(x.param, element_size(x.param_dtype) * i);
  }
  fetch_ahead<L>(x.grad, element_size(x.grad_dtype) * i);
  fetch_ahead<L>(x.exp_avg, element_size(x.state_dtype) * i);
  fetch_ahead<L>(x.exp_avg_sq, element_size(x.state_dtype) * i);
  if (x.max_exp_avg_sq != nullptr) {
    fetch_ahead<L>(x.max_exp_avg_sq, element_size(x.state_dtype) * i);
  }
  if (x.weights != Weights::kPlain) {
    fetch_ahead<L>(x.master, master_size(x.weights) * i);
  }
}

// Inlined into every caller: where types are constants, the branches on them go.
[[gnu::always_inline]] inline void adam_loop(const AdamScalars<float>& scalars, AdamStreams x,
                                             int64_t n) {
  const AdamScalars<float> s = scalars;
  const int64_t param_size = element_size(x.param_dtype);
  x.param_past_caches = x.param_past_caches && x.weights == Weights::kMaster;
  int64_t i = 0;
  if (x.param_past_caches) {  // up to where a register of the parameter is aligned
    const auto misaligned = [&] {
      const auto at = reinterpret_cast<uintptr_t>(x.param) + static_cast<uintptr_t>(param_size * i);
      return at % static_cast<uintptr_t>(FloatLane::width * param_size) != 0;
    };
    for (; i < n && misaligned(); ++i) {
      adam_streams<ScalarLane<float>>(s, x, i);
    }
  }
  for (; i + FloatLane::width <= n; i += FloatLane::width) {
    fetch_streams_ahead(x, i);
    adam_streams<FloatLane>(s, x, i);
  }
  for (; i < n; ++i) {
    adam_streams<ScalarLane<float>>(s, x, i);
  }
}

// bf16 parameters and gradients, rounded to nearest, without amsgrad.
template <Weights kWeights, DType kState>
void adam_bf16(const AdamScalars<float>& scalars, const AdamStreams& streams, int64_t n) {
  AdamStreams x = streams;
  x.param_dtype = x.grad_dtype = DType::kBFloat16;
  x.state_dtype = kState;
  x.weights = kWeights;
  x.random = nullptr;
  x.max_exp_avg_sq = nullptr;
  adam_loop(scalars, x, n);
}

// Any types, and without branches on them those that large models are trained in, where they would
// take a third of the time of 16-bit moments and a tenth of that of fp32 ones.
[[gnu::flatten]] void adam_any(const AdamScalars<float>& scalars, const AdamStreams& x, int64_t n) {
  const bool usual = x.param_dtype == DType::kBFloat16 && x.grad_dtype == DType::kBFloat16 &&
                     x.random == nullptr && x.max_exp_avg_sq == nullptr;
  if (usual && x.weights == Weights::kPlain && x.state_dtype == DType::kBFloat16) {
    adam_bf16<Weights::kPlain, DType::kBFloat16>(scalars, x, n);
  } else if (usual && x.weights == Weights::kMaster && x.state_dtype == DType::kFloat32) {
    adam_bf16<Weights::kMaster, DType::kFloat32>(scalars, x, n);
  } else if (usual && x.weights == Weights::kRemainder && x.state_dtype == DType::kFloat32) {
    adam_bf16<Weights::kRemainder, DType::kFloat32>(scalars, x, n);
  } else {
    adam_loop(scalars, x, n);
  }
}

// One register of a traced update. Weights and exp_avg are taken as they are stored, from the
// first-level cache.
template <class L>
[[gnu::always_inline]] inline int64_t traced_streams(const AdamScalars<float>& s,
                                                     const AdamStreams& x, int64_t i,
                                                     float* change) {
  const auto before = load_weight<L>(x, i);
  adam_streams<L>(s, x, i);
  const auto after = load_weight<L>(x, i);
  L::store(change + i, L::sub(after, before));
  return L::count_lost(before, after, load_any<L>(x.exp_avg, x.state_dtype, i), s.has_decay);
}

[[gnu::always_inline]] inline int64_t traced_loop(const AdamScalars<float>& scalars,
                                                  const AdamStreams& x, float* change, int64_t n) {
  const AdamScalars<float> s = scalars;
  int64_t lost = 0;
  int64_t i = 0;
  for (; i + FloatLane::width <= n; i += FloatLane::width) {
    fetch_streams_ahead(x, i);
    lost += traced_streams<FloatLane>(s, x, i, change);
  }
  for (; i < n; ++i) {
    lost += traced_streams<ScalarLane<float>>(s, x, i, change);
  }
  return lost;
}

// Without branches on the types where all are fp32.
[[gnu::flatten]] int64_t adam_traced(const AdamScalars<float>& scalars, const AdamStreams& streams,
                                     float* change, int64_t n) {
  AdamStreams x = streams;
  if (x.weights == Weights::kPlain && x.param_dtype == DType::kFloat32 &&
      x.grad_dtype == DType::kFloat32 && x.state_dtype == DType::kFloat32) {
    x.weights = Weights::kPlain;  // a constant, so that the compiler drops the branches on it
    x.param_dtype = x.grad_dtype = x.state_dtype = DType::kFloat32;
    x.random = nullptr;  // fp32 is not rounded
    x.param_past_caches = false;
    return traced_loop(scalars, x, change, n);
  }
  return traced_loop(scalars, x, change, n);
}

template <class L>
int64_t traced_update(const AdamScalars<double>& s, double* param, const double* grad,
                      double* exp_avg, double* exp_avg_sq, double* max_exp_avg_sq, double* change) {
  const auto before = L::load(param);
  adam_update<L>(s, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
  const auto after = L::load(param);
  L::store(change, L::sub(after, before));
  return L::count_lost(before, after, L::load(exp_avg), s.has_decay);
}

int64_t adam_traced_double(const AdamScalars<double>& s, double* param, const double* grad,
                           double* exp_avg, double* exp_avg_sq, double* max_exp_avg_sq,
                           double* change, int64_t n) {
  int64_t lost = 0;
  int64_t i = 0;
  const auto update = [&]<class L>(L) {
    lost += traced_update<L>(s, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                             max_exp_avg_sq == nullptr ? nullptr : max_exp_avg_sq + i, change + i);
  };
  for (; i + DoubleLane::width <= n; i += DoubleLane::width) {
    update(DoubleLane{});
  }
  for (; i < n; ++i) {
    update(ScalarLane<double>{});
  }
  return lost;
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

}  // namespace

const KernelTable& TORCHOPT_KERNELS() {
  static constexpr KernelTable table = {
      .name = kName,
      .adam_float = adam<FloatLane>,
      .adam_streams = adam_any,
      .adam_double = adam<DoubleLane>,
      .adam_traced_float = adam_traced,
      .adam_traced_double = adam_traced_double,
      // In the order of DType.
      .block_sum_of_squares = {block_sum<float>, block_sum<double>, block_sum<BFloat16>,
                               block_sum<Float16>},
      .exact_sum_of_squares = {exact_sum<float>, exact_sum<double>, exact_sum<BFloat16>,
                               exact_sum<Float16>},
      .random_bits = random_bits<Integers>,
      .scaled_copy = {{scaled_copy<float, float>, nullptr, scaled_copy<float, BFloat16>,
                       scaled_copy<float, Float16>},
                      {nullptr, scaled_copy<double, double>, nullptr, nullptr},
                      {scaled_copy<BFloat16, float>, nullptr, scaled_copy<BFloat16, BFloat16>,
                       scaled_copy<BFloat16, Float16>},
                      {scaled_copy<Float16, float>, nullptr, scaled_copy<Float16, BFloat16>,
                       scaled_copy<Float16, Float16>}},
      .digest = {nullptr, digest<Integers, uint16_t>, digest<Integers, uint32_t>,
                 digest<Integers, uint64_t>},
  };
  return table;
}

}  // namespace torchopt_ext

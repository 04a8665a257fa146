// Compiled once per instruction set, without torch; the compiler's flags choose the lanes and
// TORCHOPT_KERNELS names the getter. Everything else stays in anonymous namespaces
// (kernels/host_device.h).
#include "cpu/kernel_table.h"
#include "kernels/adam.h"
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
  const auto update = [&]<class Lane>(int64_t i) {
    adam_update<Lane>(s, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                      max_exp_avg_sq != nullptr ? max_exp_avg_sq + i : nullptr);
  };
  int64_t i = 0;
  for (; i + L::width <= n; i += L::width) {
    update.template operator()<L>(i);
  }
  for (; i < n; ++i) {
    update.template operator()<ScalarLane<T>>(i);
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

template <class T>
void widen_all(const void* from, float* to, int64_t n) {
  const auto* x = static_cast<const T*>(from);
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    Avx2Float::store(to + i, widen8(x + i));
  }
#endif
  for (; i < n; ++i) {
    to[i] = widen(x[i]);
  }
}

template <class T>
void narrow_all(const float* from, void* to, int64_t n) {
  auto* x = static_cast<T*>(to);
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    narrow8(x + i, Avx2Float::load(from + i));
  }
#endif
  for (; i < n; ++i) {
    x[i] = narrow<T>(from[i]);
  }
}

}  // namespace

const KernelTable& TORCHOPT_KERNELS() {
  static constexpr KernelTable table = {
      .name = kName,
      .adam_float = adam<FloatLane>,
      .adam_double = adam<DoubleLane>,
      // In the order of DType.
      .block_sum_of_squares = {block_sum<float>, block_sum<double>, block_sum<BFloat16>,
                               block_sum<Float16>},
      .exact_sum_of_squares = {exact_sum<float>, exact_sum<double>, exact_sum<BFloat16>,
                               exact_sum<Float16>},
      .widen = {nullptr, nullptr, widen_all<BFloat16>, widen_all<Float16>},
      .narrow = {nullptr, nullptr, narrow_all<BFloat16>, narrow_all<Float16>},
  };
  return table;
}

}  // namespace torchopt_ext

// Compiled once per instruction set, without torch; the compiler's flags choose the lanes and
// TORCHOPT_KERNELS names the getter. Everything else stays in anonymous namespaces
// (kernels/host_device.h).
#include <type_traits>

#include "cpu/adam_loop.h"
#include "cpu/digest_words.h"
#include "cpu/kernel_table.h"
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
using Words = Avx512Words;
#elif defined(__AVX2__)
constexpr const char* kName = "avx2";
using FloatLane = Avx2Float;
using DoubleLane = Avx2Double;
using Words = Avx2Words;
#else
constexpr const char* kName = "default";
using FloatLane = ScalarLane<float>;
using DoubleLane = ScalarLane<double>;
using Words = void;
#endif

template <class T>
double block_sum(const void* x, int64_t n) {
  return block_sum_of_squares<DoubleLane>(static_cast<const T*>(x), n);
}

template <class T>
void exact_sum(const void* x, int64_t n, const void* next, ExactAccumulator& acc) {
  exact_sum_of_squares<DoubleLane>(static_cast<const T*>(x), n, next, acc);
}

// With a constant layout, but for amsgrad where there is no 16-bit array.
template <AdamKind kKind>
void adam(const TensorScalars& scalars, const TensorWork& work, const StepOptions& options,
          int64_t begin, int64_t end, bool past_caches) {
  Layout layout = layout_of(kKind);
  if constexpr (kKind == AdamKind::kFloat64) {
    layout.amsgrad = work.layout.amsgrad;
    const StepMode mode{.write_back = options.write_back_gradients};
    adam_loop<DoubleLane>(scalars.as_double, layout, mode, work, begin, end, nullptr);
  } else {
    layout.amsgrad = kKind == AdamKind::kFloat32 && work.layout.amsgrad;
    const StepMode mode{.past_caches = layout.master == Master::kFloat32 && past_caches};
    adam_loop<FloatLane>(scalars.as_float, layout, mode, work, begin, end, nullptr);
  }
}

template <>
void adam<AdamKind::kBFloat16Rounded>(const TensorScalars& scalars, const TensorWork& work,
                                      const StepOptions& options, int64_t begin, int64_t end,
                                      bool /*past_caches*/) {
  const Layout layout = layout_of(AdamKind::kBFloat16Rounded);
  for_each_stream(work, options, begin, end, [&](int64_t first, int64_t last, const Draws& draws) {
    adam_loop<FloatLane>(scalars.as_float, layout, {}, work, first, last, &draws);
  });
}

template <>
void adam<AdamKind::kGeneral>(const TensorScalars& scalars, const TensorWork& work,
                              const StepOptions& options, int64_t begin, int64_t end,
                              bool past_caches) {
  const Layout& layout = work.layout;
  const StepMode mode{.write_back = options.write_back_gradients,
                      .past_caches = layout.master == Master::kFloat32 && past_caches};
  if (!rounds_randomly(options, layout)) {
    adam_loop<FloatLane>(scalars.as_float, layout, mode, work, begin, end, nullptr);
    return;
  }
  for_each_stream(work, options, begin, end, [&](int64_t first, int64_t last, const Draws& draws) {
    adam_loop<FloatLane>(scalars.as_float, layout, mode, work, first, last, &draws);
  });
}

int64_t adam_traced(const TensorScalars& scalars, const TensorWork& work,
                    const StepOptions& options, int64_t begin, int64_t end, void* change) {
  const StepMode mode{.write_back = options.write_back_gradients};
  if (work.kind == AdamKind::kFloat64) {
    return adam_traced_loop<DoubleLane>(scalars.as_double, work.layout, mode, work, begin, end,
                                        nullptr, static_cast<double*>(change));
  }
  auto* changes = static_cast<float*>(change);
  if (work.kind == AdamKind::kFloat32) {  // without branches on the types
    Layout layout = layout_of(AdamKind::kFloat32);
    layout.amsgrad = work.layout.amsgrad;
    return adam_traced_loop<FloatLane>(scalars.as_float, layout, {}, work, begin, end, nullptr,
                                       changes);
  }
  const auto traced = [&](int64_t first, int64_t last, const Draws* draws) {
    return adam_traced_loop<FloatLane>(scalars.as_float, work.layout, mode, work, first, last,
                                       draws, changes + (first - begin));
  };
  if (!rounds_randomly(options, work.layout)) {
    return traced(begin, end, nullptr);
  }
  int64_t lost = 0;
  for_each_stream(work, options, begin, end, [&](int64_t first, int64_t last, const Draws& draws) {
    lost += traced(first, last, &draws);
  });
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
      // In the order of AdamKind.
      .adam = {adam<AdamKind::kFloat32>, adam<AdamKind::kFloat64>, adam<AdamKind::kBFloat16>,
               adam<AdamKind::kBFloat16Master>, adam<AdamKind::kBFloat16Remainder>,
               adam<AdamKind::kBFloat16Rounded>, adam<AdamKind::kGeneral>},
      .adam_traced = adam_traced,
      // In the order of DType.
      .block_sum_of_squares = {block_sum<float>, block_sum<double>, block_sum<BFloat16>,
                               block_sum<Float16>},
      .exact_sum_of_squares = {exact_sum<float>, exact_sum<double>, exact_sum<BFloat16>,
                               exact_sum<Float16>},
      .scaled_copy = {{scaled_copy<float, float>, nullptr, scaled_copy<float, BFloat16>,
                       scaled_copy<float, Float16>},
                      {nullptr, scaled_copy<double, double>, nullptr, nullptr},
                      {scaled_copy<BFloat16, float>, nullptr, scaled_copy<BFloat16, BFloat16>,
                       scaled_copy<BFloat16, Float16>},
                      {scaled_copy<Float16, float>, nullptr, scaled_copy<Float16, BFloat16>,
                       scaled_copy<Float16, Float16>}},
      .digest = {nullptr, digest<Words, uint16_t>, digest<Words, uint32_t>,
                 digest<Words, uint64_t>},
  };
  return table;
}

}  // namespace torchopt_ext

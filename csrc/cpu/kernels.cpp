// Compiled once per instruction set, without torch. The compiler's flags select the lane types, and
// TORCHOPT_KERNELS is the name of the function that returns the table. Everything else stays in
// anonymous namespaces (kernels/host_device.h).
#include <type_traits>
#include <utility>

#include "cpu/block_sums.h"
#include "cpu/digest.h"
#include "cpu/exact_squares.h"
#include "cpu/kernel_table.h"
#include "cpu/product_kernel.h"
#include "cpu/quantized_loop.h"
#include "cpu/traced.h"
#include "cpu/update_loop.h"
#include "kernels/average.h"
#include "kernels/scaled_copy.h"
#if defined(__AVX512F__)
#include "cpu/lane_avx512.h"
#include "cpu/pair_lane.h"
#elif defined(__AVX2__)
#include "cpu/lane_avx2.h"
#include "cpu/pair_lane.h"
#endif

namespace torchopt_ext {
namespace {

#if defined(__AVX512F__)
constexpr const char* kName = "avx512";
using FloatLane = Avx512Float;
using WideLane = PairLane<Avx512Float>;
using DoubleLane = Avx512Double;
#elif defined(__AVX2__)
constexpr const char* kName = "avx2";
using FloatLane = Avx2Float;
using WideLane = PairLane<Avx2Float>;
using DoubleLane = Avx2Double;
#else
constexpr const char* kName = "default";
using FloatLane = ScalarLane<float>;
using WideLane = FloatLane;
using DoubleLane = ScalarLane<double>;
#endif

template <Kind kKind>
using MainLane = std::conditional_t<is_double(kKind), DoubleLane,
                                    std::conditional_t<kTraits<kKind>.pairs, WideLane, FloatLane>>;
// The lane type of the elements that do not fill a register of the main loop.
template <Kind kKind>
using TailLane = std::conditional_t<kTraits<kKind>.single_registers, FloatLane,
                                    ScalarLane<typename MainLane<kKind>::scalar>>;

// Updates elements [begin, end); with 8-bit moments whole groups.
template <Kind kKind, class Trace>
void step(const TensorScalars& scalars, const TensorWork& work, const StepOptions& options,
          int64_t begin, int64_t end, Trace&& trace) {
  const Layout layout = known_layout<kKind>(work.layout);
  StepMode mode = known_mode<kKind>(options, layout);
  if constexpr (is_quantized(kKind)) {
    const RoundingKey key = mode.rounds ? rounding_key(options, work) : RoundingKey{};
    quantized_loop<AlgorithmOf<kKind>, WideLane, /*kWhole=*/!kTraits<kKind>.general>(
        scalars.as_float, layout, mode, work, begin, end, key, trace);
  } else {
    using L = MainLane<kKind>;
    mode.past_caches = layout.master == Master::kFloat32 && options.past_caches;
    const auto loop = [&](int64_t first, int64_t last, const Draws* draws)
        __attribute__((always_inline)) {
      update_loop<AlgorithmOf<kKind>, L, TailLane<kKind>>(
          scalars_in<typename L::scalar>(scalars), layout, mode, work, first, last, draws, trace);
    };
    if (!mode.rounds) {
      loop(begin, end, nullptr);
      return;
    }
    for_each_run(
        work, begin,
        end, [&](int64_t first, int64_t last, uint64_t number) __attribute__((always_inline)) {
          const Draws draws{rounding_stream(rounding_key(options, work), number),
                            static_cast<uint32_t>(number)};
          loop(first, last, &draws);
        });
  }
}

template <Kind kKind>
int64_t update(const TensorScalars& scalars, const TensorWork& work, const StepOptions& options,
               int64_t begin, int64_t end, void* change) {
  if (change == nullptr) {
    step<kKind>(scalars, work, options, begin, end, NoTrace{});
    return 0;
  }
  using Scalar = typename MainLane<kKind>::scalar;
  LoopTrace<Scalar> trace(begin, static_cast<Scalar*>(change));
  step<kKind>(scalars, work, options, begin, end, trace);
  return trace.lost();
}

template <class L>
void average(const TensorWork& work, const StepOptions& options, int64_t begin, int64_t end,
             double weight) {
  using Scalar = ScalarLane<typename L::scalar>;
  const AverageScalars<typename L::scalar> scalars(weight);
  const TensorWork copy = work;  // stays in registers: stores may alias `work`
  const auto loop = [&](int64_t first, int64_t last, const Draws* draws)
      __attribute__((always_inline)) {
    int64_t i = first;
    const auto at = [&](const auto& lane) __attribute__((always_inline)) {
      using Lane = std::remove_cvref_t<decltype(lane)>;
      const ElementsAt<Lane> elements{lane, copy.layout, copy.memory, i};
      if constexpr (Lane::has_narrow_types) {
        const auto random = draws != nullptr ? draws->of<Lane>(i - first) : typename Lane::Random{};
        average_elements(elements, copy.ema, scalars, draws != nullptr ? &random : nullptr);
      } else {
        average_elements(elements, copy.ema, scalars, static_cast<const Draws*>(nullptr));
      }
    };
    for (; i + L::width <= last; i += L::width) {
      at(L{});
    }
    for (; i < last; ++i) {
      at(Scalar{});
    }
  };
  if (!rounds_average(work)) {
    loop(begin, end, nullptr);
    return;
  }
  for_each_run(work, begin, end, [&](int64_t first, int64_t last, uint64_t number) {
    const Draws draws{rounding_stream(average_key(options, work), number),
                      static_cast<uint32_t>(number)};
    loop(first, last, &draws);
  });
}

template <class T>
void add_squares(const void* memory, int64_t n, int64_t row_length, const void* next,
                 ExactAccumulator& acc) {
  const auto* x = static_cast<const T*>(memory);
  if (row_length >= kShortRow) {  // whole rows, or blocks of one row
    const int64_t length = row_length < n ? row_length : n;
    add_sums_of_rows<DoubleLane, T>(x, n / length, length, next, acc);
    return;
  }
  for (int64_t i = 0; i < n; i += kBlockElements) {
    const bool is_last = n - i <= kBlockElements;
    add_exact_squares<DoubleLane, T>(x + i, is_last ? n - i : kBlockElements,
                                     is_last ? next : x + i + kBlockElements, acc);
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

template <int... kNumbers>
constexpr KernelTable table_of(std::integer_sequence<int, kNumbers...>) {
  return {
      .name = kName,
      .update = {update<Kind{kNumbers}>...},
      .traced = traced_update,
      .average = {average<WideLane>, average<DoubleLane>},
      // In the order of DType.
      .add_squares = {add_squares<float>, add_squares<double>, add_squares<BFloat16>,
                      add_squares<Float16>},
      .block_sum = {block_sum<DoubleLane, float>, block_sum<DoubleLane, double>,
                    block_sum<DoubleLane, BFloat16>, block_sum<DoubleLane, Float16>},
      .scaled_copy = {{scaled_copy<float, float>, nullptr, scaled_copy<float, BFloat16>,
                       scaled_copy<float, Float16>},
                      {nullptr, scaled_copy<double, double>, nullptr, nullptr},
                      {scaled_copy<BFloat16, float>, nullptr, scaled_copy<BFloat16, BFloat16>,
                       scaled_copy<BFloat16, Float16>},
                      {scaled_copy<Float16, float>, nullptr, scaled_copy<Float16, BFloat16>,
                       scaled_copy<Float16, Float16>}},
      .digest = digest,
      .product = product<FloatLane>,
      .scale = scale_by_double,
  };
}

}  // namespace

const KernelTable& TORCHOPT_KERNELS() {
  static constexpr KernelTable table = table_of(std::make_integer_sequence<int, kKinds>{});
  return table;
}

}  // namespace torchopt_ext

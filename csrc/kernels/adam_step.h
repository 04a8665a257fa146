// Adam on a register of elements in memory: load, update, round, store. Templates over the lane
// type (lane.h), whose loads and stores convert. Every CPU build and CUDA share these rules. Lanes
// are types and values: arithmetic is static, and memory is accessed through a value, because a
// part of a register knows its length.
//
// Branches on the layout select element types. Where a kernel's layout is a constant, the compiler
// removes the branches; elsewhere they go the same way throughout a tensor and cost little.
// Functions are always inlined: otherwise GCC shares a copy among kernels, which then branches on
// their layouts.
#pragma once

#include "kernels/adam.h"
#include "kernels/scaled_copy.h"
#include "kernels/tensor_work.h"

namespace torchopt_ext {

namespace {

template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg load_as(const L& lane, DType dtype,
                                                                  const void* x, int64_t i) {
  if constexpr (!L::converts) {
    return lane.load(static_cast<const typename L::scalar*>(x) + i);
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return lane.load(static_cast<const BFloat16*>(x) + i);
      case DType::kFloat16:
        return lane.load(static_cast<const Float16*>(x) + i);
      default:
        return lane.load(static_cast<const float*>(x) + i);
    }
  }
}

// Loads exp_avg, or its code for 8-bit moments. The caller only tests whether the value is 0.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg load_exp_avg(const L& lane,
                                                                       const Layout& layout,
                                                                       void* const (&x)[kArrays],
                                                                       int64_t i) {
  if constexpr (L::any_layout) {
    if (layout.state == DType::kInt8) {
      return lane.load_code(static_cast<const int8_t*>(x[kExpAvg]) + i);
    }
  }
  return load_as(lane, layout.state, x[kExpAvg], i);
}

// Stores a register, rounded to nearest.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline void store_as(const L& lane, DType dtype, void* x,
                                                        int64_t i, typename L::reg a) {
  if constexpr (!L::converts) {
    lane.store(static_cast<typename L::scalar*>(x) + i, a);
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return lane.store(static_cast<BFloat16*>(x) + i, a);
      case DType::kFloat16:
        return lane.store(static_cast<Float16*>(x) + i, a);
      default:
        return lane.store(static_cast<float*>(x) + i, a);
    }
  }
}

// Rounds bf16 stochastically if `random` is given, otherwise to nearest.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void store_rounded(const L& lane, DType dtype, void* x,
                                                             int64_t i, typename L::reg a,
                                                             const Random* random, Array array) {
  if constexpr (L::any_layout) {
    if (random != nullptr && dtype == DType::kBFloat16) {
      lane.store_stochastic(static_cast<BFloat16*>(x) + i, a, *random, array);
      return;
    }
  }
  store_as(lane, dtype, x, i, a);
}

// Loads the weight that the update changes.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg load_weight(const L& lane,
                                                                      const Layout& layout,
                                                                      void* const (&x)[kArrays],
                                                                      int64_t i) {
  if constexpr (L::converts) {
    if (layout.master == Master::kFloat32) {
      return lane.load(static_cast<const float*>(x[kMaster]) + i);
    }
  }
  if constexpr (L::any_layout) {
    const auto* weight = static_cast<const BFloat16*>(x[kParam]) + i;
    if (layout.master == Master::kRemainder) {
      return lane.load_joined(weight, static_cast<const int16_t*>(x[kMaster]) + i);
    }
    if (layout.master == Master::kRemainder8) {
      return lane.load_joined(weight, static_cast<const int8_t*>(x[kMaster]) + i);
    }
  }
  return load_as(lane, layout.param, x[kParam], i);
}

template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void store_weight(const L& lane, const Layout& layout,
                                                            const StepMode& mode,
                                                            void* const (&x)[kArrays], int64_t i,
                                                            typename L::reg p,
                                                            const Random* random) {
  if constexpr (L::converts) {
    if (layout.master == Master::kFloat32) {
      lane.store(static_cast<float*>(x[kMaster]) + i, p);
      if (!mode.past_caches) {
        store_as(lane, layout.param, x[kParam], i, p);
      } else if (layout.param == DType::kBFloat16) {
        lane.stream(static_cast<BFloat16*>(x[kParam]) + i, p);
      } else {
        lane.stream(static_cast<Float16*>(x[kParam]) + i, p);
      }
      return;
    }
  }
  if constexpr (L::any_layout) {
    auto* weight = static_cast<BFloat16*>(x[kParam]) + i;
    if (layout.master == Master::kRemainder) {
      lane.store_split(weight, static_cast<int16_t*>(x[kMaster]) + i, p);
      return;
    }
    if (layout.master == Master::kRemainder8) {
      auto* remainder = static_cast<int8_t*>(x[kMaster]) + i;
      if (random != nullptr) {
        lane.store_split_stochastic(weight, remainder, p, *random);
      } else {
        lane.store_split(weight, remainder, p);
      }
      return;
    }
  }
  store_rounded(lane, layout.param, x[kParam], i, p, random, kParam);
}

// Updates a register of elements of arrays `x`, from i on. `random` has random bits in the lane's
// form, or is null.
template <class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void adam_step(const L& lane,
                                                         const AdamScalars<typename L::scalar>& s,
                                                         const Layout& layout, const StepMode& mode,
                                                         void* const (&x)[kArrays], int64_t i,
                                                         const Random* random) {
  using R = typename L::reg;
  R p = load_weight(lane, layout, x, i);
  const R g = load_as(lane, layout.grad, x[kGrad], i);
  R m = load_as(lane, layout.state, x[kExpAvg], i);
  R v = load_as(lane, layout.state, x[kExpAvgSq], i);
  R vmax = layout.amsgrad ? load_as(lane, layout.state, x[kMaxExpAvgSq], i) : L::set1(0);
  adam_registers<L>(s, p, g, m, v, vmax, layout.amsgrad);
  store_rounded(lane, layout.state, x[kExpAvg], i, m, random, kExpAvg);
  store_rounded(lane, layout.state, x[kExpAvgSq], i, v, random, kExpAvgSq);
  store_weight(lane, layout, mode, x, i, p, random);
  if (layout.amsgrad) {
    store_rounded(lane, layout.state, x[kMaxExpAvgSq], i, vmax, random, kMaxExpAvgSq);
  }
  if (mode.write_back) {
    store_as(lane, layout.grad, x[kGrad], i, scaled<L>(g, s.grad_factor));
  }
}

}  // namespace
}  // namespace torchopt_ext

// Adam on a register of elements in memory: load, update, round, store. A template over the lane
// type (lane.h), whose loads and stores convert. These rules are written here alone, for every CPU
// build and for CUDA.
//
// Element types are told apart by branches on the layout. Where a kernel's layout is a constant the
// compiler takes them out; elsewhere they go the same way throughout a tensor and cost little.
// Inlined always: GCC would share a copy among kernels, which then branches on their layouts.
#pragma once

#include "kernels/adam.h"
#include "kernels/scaled_copy.h"
#include "kernels/tensor_work.h"

namespace torchopt_ext {

// What a kernel does besides the update.
struct StepMode {
  bool write_back = false;  // StepOptions::write_back_gradients
  // Beside a master the parameter is written and not read: aligned stores past the caches spare
  // reading its lines first.
  bool past_caches = false;
};

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

// exp_avg as it is stored, or its code: for whether it is 0.
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

// Rounded to nearest.
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

// bf16 is rounded by random bits, if there are any.
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

// The value that the update changes.
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
      return lane.joined(weight, static_cast<const int16_t*>(x[kMaster]) + i);
    }
    if (layout.master == Master::kRemainder8) {
      return lane.joined(weight, static_cast<const int8_t*>(x[kMaster]) + i);
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

// A register of elements of arrays `x` from i on; `random` has their random bits as the lane takes
// them, or is null.
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

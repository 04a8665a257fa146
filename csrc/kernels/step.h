// A step on a register of elements in memory: load, update, round, store. Templates over the lane
// type (lane.h), whose loads and stores convert. Every CPU build and CUDA share these rules. Lanes
// are types and values: arithmetic is static, and memory is accessed through a value, because a
// part of a register knows its length.
//
// Branches on the layout select element types. Where a kernel's layout is a constant, the compiler
// removes the branches; elsewhere they go the same way throughout a tensor and cost little.
// Functions are always inlined: otherwise GCC shares a copy among kernels, which then branches on
// their layouts.
#pragma once

#include "kernels/algorithm.h"
#include "kernels/scaled_copy.h"
#include "kernels/tensor_work.h"

namespace torchopt_ext {
namespace {

// Elements [i, i + L::width) of arrays `x`. Stores round to nearest if `random` is null; otherwise
// it points to random bits in the lane's form.
template <class L>
struct ElementsAt {
  using R = typename L::reg;

  L lane;
  const Layout& layout;
  void* const (&x)[kArrays];
  int64_t i;

  template <class T>
  [[gnu::always_inline]] TORCHOPT_HD T* address(Array array) const {
    return static_cast<T*>(x[array]) + i;
  }

  // Returns visit(element) with an element of the given type.
  template <class Visit>
  [[gnu::always_inline]] TORCHOPT_HD static auto with_type(DType dtype, const Visit& visit) {
    if constexpr (!L::converts) {
      return visit(typename L::scalar{});
    } else {
      switch (dtype) {
        case DType::kBFloat16:
          return visit(BFloat16{});
        case DType::kFloat16:
          return visit(Float16{});
        default:
          return visit(0.0f);
      }
    }
  }
  [[gnu::always_inline]] TORCHOPT_HD R load(DType dtype, Array array) const {
    return with_type(
        dtype, [&](auto element) __attribute__((always_inline)) {
          return lane.load(address<const decltype(element)>(array));
        });
  }
  [[gnu::always_inline]] TORCHOPT_HD void store(DType dtype, Array array, R a) const {
    with_type(
        dtype, [&](auto element) __attribute__((always_inline)) {
          lane.store(address<decltype(element)>(array), a);
        });
  }
  template <class Random>
  [[gnu::always_inline]] TORCHOPT_HD void store(DType dtype, Array array, R a,
                                                const Random* random) const {
    if constexpr (L::has_narrow_types) {
      if (random != nullptr && dtype == DType::kBFloat16) {
        return lane.store_stochastic(address<BFloat16>(array), a, *random, array);
      }
    }
    store(dtype, array, a);
  }

  [[gnu::always_inline]] TORCHOPT_HD R gradient() const { return load(layout.grad, kGrad); }
  [[gnu::always_inline]] TORCHOPT_HD void store_scaled_gradient(R g,
                                                                typename L::scalar factor) const {
    store(layout.grad, kGrad, scaled<L>(g, factor));
  }
  // Returns what moves the weights: the first state, its code for 8-bit moments, or the gradient if
  // there is no state. The caller only tests whether the value is 0.
  [[gnu::always_inline]] TORCHOPT_HD R mover() const {
    if ((layout.states & 1) == 0) {
      return gradient();
    }
    if constexpr (L::has_narrow_types) {
      if (layout.state == DType::kInt8) {
        return lane.load_code(address<const int8_t>(kState));
      }
    }
    return load(layout.state, kState);
  }

  // Returns the weight that the update changes.
  [[gnu::always_inline]] TORCHOPT_HD R weight() const {
    if constexpr (L::converts) {
      if (layout.master == Master::kFloat32) {
        return lane.load(address<const float>(kMaster));
      }
    }
    if constexpr (L::has_narrow_types) {
      if (layout.master == Master::kRemainder) {
        return lane.load_joined(address<const BFloat16>(kParam), address<const int16_t>(kMaster));
      }
      if (layout.master == Master::kRemainder8) {
        return lane.load_joined(address<const BFloat16>(kParam), address<const int8_t>(kMaster));
      }
    }
    return load(layout.param, kParam);
  }
  template <class Random>
  [[gnu::always_inline]] TORCHOPT_HD void store_weight(R p, const StepMode& mode,
                                                       const Random* random) const {
    if constexpr (L::converts) {
      if (layout.master == Master::kFloat32) {
        lane.store(address<float>(kMaster), p);
        if (!mode.past_caches) {
          store(layout.param, kParam, p);
        } else if (layout.param == DType::kBFloat16) {
          lane.stream(address<BFloat16>(kParam), p);
        } else {
          lane.stream(address<Float16>(kParam), p);
        }
        return;
      }
    }
    if constexpr (L::has_narrow_types) {
      if (layout.master == Master::kRemainder) {
        return lane.store_split(address<BFloat16>(kParam), address<int16_t>(kMaster), p);
      }
      if (layout.master == Master::kRemainder8) {
        if (random != nullptr) {
          return lane.store_split_stochastic(address<BFloat16>(kParam), address<int8_t>(kMaster), p,
                                             *random);
        }
        return lane.store_split(address<BFloat16>(kParam), address<int8_t>(kMaster), p);
      }
    }
    store(layout.param, kParam, p, random);
  }
};

// Stores what update_registers() made of kParam: a weight, or a direction rounded to nearest.
template <class A, class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void store_updated(const ElementsAt<L>& at,
                                                             typename L::reg p,
                                                             const StepMode& mode,
                                                             const Random* random) {
  if constexpr (kWritesDirection<A>) {
    at.store(at.layout.param, kParam, p);
  } else {
    at.store_weight(p, mode, random);
  }
}

template <class A, class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline void update_elements(const ElementsAt<L>& at,
                                                               const Scalars<typename L::scalar>& s,
                                                               const StepMode& mode,
                                                               const Random* random) {
  using R = typename L::reg;
  const Layout& layout = at.layout;
  R p{};
  if constexpr (!kWritesDirection<A>) {
    p = at.weight();
  }
  const R g = at.gradient();
  R state[kMostStates] = {};
  for_each_state(
      layout.states, [&](int k) __attribute__((always_inline)) {
        state[k] = at.load(layout.state, state_array(k));
      });
  update_registers<A, L>(s, p, g, state, layout.states);
  for_each_state(
      layout.states, [&](int k) __attribute__((always_inline)) {
        at.store(layout.state, state_array(k), state[k], random);
      });
  store_updated<A>(at, p, mode, random);
  if (mode.write_back) {
    at.store_scaled_gradient(g, s.grad_factor);
  }
}

}  // namespace
}  // namespace torchopt_ext

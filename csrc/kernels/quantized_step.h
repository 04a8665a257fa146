// A step on a register of elements with 8-bit moments (quantize.h). It has three parts: it averages
// the moments, updates and stores the weights, and encodes the moments when the scales of their
// group are known. Between the parts the loops keep the moments in registers or the first-level
// cache.
#pragma once

#include "kernels/quantize.h"
#include "kernels/step.h"

namespace torchopt_ext {

template <class A, class L>
using Moments = PerMoment<A, typename L::reg>;

// The scalars of a tensor. Averaged moments are multiples of `units`; `decoding` has factors of the
// old moments, in addition to their scales. An algorithm with two moments has its own
// (quantized_adam.h).
template <class A>
struct QuantizedScalars {
  static_assert(kMoments<A> == 1);
  TORCHOPT_HD explicit QuantizedScalars(const Scalars<float>& scalars) : scalars(scalars) {}

  PerMoment<A, float> units{{1.0f}};
  PerMoment<A, float> decoding{{kCodeUnit}};
  Scalars<float> scalars;
};

// The first two parts of a step. `group_decoding` has the factors of the codes of the elements'
// group: its scales times QuantizedScalars::decoding.
template <class A, class L>
struct QuantizedStep {
  using R = typename L::reg;

  TORCHOPT_HD explicit QuantizedStep(const QuantizedScalars<A>& scalars) : s(scalars.scalars) {}

  // Returns the elements' moments after this step, in units.
  [[gnu::always_inline]] TORCHOPT_HD Moments<A, L> averaged(
      const ElementsAt<L>& at, const PerMoment<A, float>& group_decoding) const {
    return {{updated(at, group_decoding).state}};
  }
  // Returns a root whose group has divisors that weights() need not clamp, on the host.
  float largest_root() const { return 0.0f; }
  // Returns the elements' weights after this step.
  [[gnu::always_inline]] TORCHOPT_HD R weights(const ElementsAt<L>& at,
                                               const PerMoment<A, float>& group_decoding,
                                               const Moments<A, L>& /*moments*/,
                                               bool /*clamps*/ = true) const {
    return updated(at, group_decoding).weight;
  }

  Scalars<float> s;

 private:
  struct Updated {
    R weight;
    R state;
  };
  [[gnu::always_inline]] TORCHOPT_HD Updated
  updated(const ElementsAt<L>& at, const PerMoment<A, float>& group_decoding) const {
    R p{};
    if constexpr (!kWritesDirection<A>) {
      p = at.weight();
    }
    R state[kMostStates] = {L::mul(at.lane.load_code(at.template address<int8_t>(kState)),
                                   L::set1(group_decoding.of[0]))};
    update_registers<A, L>(s, p, at.gradient(), state, 1);
    return {p, state[0]};
  }
};

namespace {

// Returns random offsets for the codes of moment k, in place of dither.
template <class A, int kMoment, class L, class Random>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg random_offset(const Random& random) {
  return L::add(L::fraction(random, state_array(kMoment)),
                L::set1(dither_start(kIsRoot<A, kMoment>)));
}

}  // namespace
}  // namespace torchopt_ext

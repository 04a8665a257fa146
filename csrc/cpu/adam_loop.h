// Loops of pass B over elements of one tensor: kernels/adam_step.h, a register at a time.
#pragma once

#include "cpu/fetch_ahead.h"
#include "kernels/adam_step.h"

namespace torchopt_ext {
namespace {

// The first n elements of a register, n < L::width; nothing beyond them is touched. What is left of
// a small tensor would otherwise spend much on single elements' roots and divisions.
template <class L>
struct Part : L {
  static constexpr bool converts = false;
  typename L::reg load(const typename L::scalar* x) const { return L::load_part(x, n); }
  void store(typename L::scalar* x, typename L::reg a) const { L::store_part(x, a, n); }
  int n;
};

// Asks for what a loop comes to after element i.
template <class L>
[[gnu::always_inline]] inline void fetch_arrays_ahead(const Layout& layout, const StepMode& mode,
                                                      void* const (&x)[kArrays], int64_t i) {
  const auto ahead = [&](Array array) {
    fetch_ahead<L>(x[array], element_size(layout, array) * i);
  };
  if (!mode.past_caches) {
    ahead(kParam);
  }
  ahead(kGrad);
  ahead(kExpAvg);
  ahead(kExpAvgSq);
  if (layout.amsgrad) {
    ahead(kMaxExpAvgSq);
  }
  if (layout.master != Master::kNone) {
    ahead(kMaster);
  }
}

// Elements [begin, end); `random` has the random bits from element `begin` on, or is null. Inlined
// into every caller: where layout and mode are constants, the branches on them go.
template <class L>
[[gnu::always_inline]] inline void adam_loop(const AdamScalars<typename L::scalar>& scalars,
                                             const Layout& layout, const StepMode& mode,
                                             const TensorWork& work, int64_t begin, int64_t end,
                                             const uint64_t* random) {
  using Scalar = ScalarLane<typename L::scalar>;
  const AdamScalars<typename L::scalar> s = scalars;
  const TensorWork copy = work;  // stays in registers: a store might change `work`
  const auto& x = copy.memory;
  const auto bits = [&](int64_t i) { return random == nullptr ? nullptr : random + (i - begin); };
  int64_t i = begin;
  if (mode.past_caches) {  // up to where a register of the parameter is aligned
    const auto size = static_cast<uintptr_t>(element_size(layout, kParam));
    const auto misaligned = [&] {
      const auto at = reinterpret_cast<uintptr_t>(x[kParam]) + size * static_cast<uintptr_t>(i);
      return at % (L::width * size) != 0;
    };
    for (; i < end && misaligned(); ++i) {
      adam_step(Scalar{}, s, layout, mode, x, i, bits(i));
    }
  }
  for (; i + L::width <= end; i += L::width) {
    fetch_arrays_ahead<L>(layout, mode, x, i);
    adam_step(L{}, s, layout, mode, x, i, bits(i));
  }
  if constexpr (L::width > 1) {
    const bool is_wide = layout.param == layout.grad && layout.param == layout.state &&
                         element_size(layout.param) == sizeof(typename L::scalar);
    if (is_wide && i < end) {
      adam_step(Part<L>{{}, static_cast<int>(end - i)}, s, layout, mode, x, i, bits(i));
      return;
    }
  }
  for (; i < end; ++i) {
    adam_step(Scalar{}, s, layout, mode, x, i, bits(i));
  }
}

// A tracked update, whose mode is the plain one: what it added to each weight as it is stored, from
// the first-level cache. Returns how many weights stayed although something was to be added.
template <class L>
[[gnu::always_inline]] inline int64_t adam_traced_loop(
    const AdamScalars<typename L::scalar>& scalars, const Layout& layout, const StepMode& mode,
    const TensorWork& work, int64_t begin, int64_t end, const uint64_t* random,
    typename L::scalar* change) {
  const AdamScalars<typename L::scalar> s = scalars;
  const TensorWork copy = work;
  const auto& x = copy.memory;
  int64_t lost = 0;
  int64_t i = begin;
  const auto update = [&](const auto& lane) {
    using Lane = std::decay_t<decltype(lane)>;
    const auto before = load_weight(lane, layout, x, i);
    adam_step(lane, s, layout, mode, x, i, random == nullptr ? nullptr : random + (i - begin));
    const auto after = load_weight(lane, layout, x, i);
    Lane::store(change + (i - begin), Lane::sub(after, before));
    lost +=
        Lane::count_lost(before, after, load_as(lane, layout.state, x[kExpAvg], i), s.has_decay);
  };
  for (; i + L::width <= end; i += L::width) {
    fetch_arrays_ahead<L>(layout, mode, x, i);
    update(L{});
  }
  for (; i < end; ++i) {
    update(ScalarLane<typename L::scalar>{});
  }
  return lost;
}

}  // namespace
}  // namespace torchopt_ext

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

// adam_step() on elements of one register, the first of which is number `i` behind that of `draws`.
template <class L>
[[gnu::always_inline]] inline void adam_register(const L& lane,
                                                 const AdamScalars<typename L::scalar>& s,
                                                 const Layout& layout, const StepMode& mode,
                                                 void* const (&x)[kArrays], int64_t at,
                                                 const Draws* draws, int64_t i) {
  if constexpr (L::converts) {
    if (draws != nullptr) {
      const auto random = L::random(draws->stream, draws->first + static_cast<uint32_t>(i));
      adam_step(lane, s, layout, mode, x, at, &random);
    } else {
      adam_step(lane, s, layout, mode, x, at, static_cast<const typename L::Random*>(nullptr));
    }
  } else {
    adam_step(lane, s, layout, mode, x, at, static_cast<const Draws*>(nullptr));
  }
}

// Elements [begin, end); `draws` begins at element `begin`, or is null. Inlined into every caller:
// where layout and mode are constants, the branches on them go.
template <class L>
[[gnu::always_inline]] inline void adam_loop(const AdamScalars<typename L::scalar>& scalars,
                                             const Layout& layout, const StepMode& mode,
                                             const TensorWork& work, int64_t begin, int64_t end,
                                             const Draws* draws) {
  using Scalar = ScalarLane<typename L::scalar>;
  const AdamScalars<typename L::scalar> s = scalars;
  const TensorWork copy = work;  // stays in registers: a store might change `work`
  const auto& x = copy.memory;
  int64_t i = begin;
  const auto update = [&](const auto& lane) __attribute__((always_inline)) {
    adam_register(lane, s, layout, mode, x, i, draws, i - begin);
  };
  if (mode.past_caches) {  // up to where a register of the parameter is aligned
    const auto size = static_cast<uintptr_t>(element_size(layout, kParam));
    const auto misaligned = [&] {
      const auto at = reinterpret_cast<uintptr_t>(x[kParam]) + size * static_cast<uintptr_t>(i);
      return at % (L::width * size) != 0;
    };
    for (; i < end && misaligned(); ++i) {
      update(Scalar{});
    }
  }
  for (; i + L::width <= end; i += L::width) {
    fetch_arrays_ahead<L>(layout, mode, x, i);
    update(L{});
  }
  if constexpr (L::width > 1) {
    const bool is_wide = layout.param == layout.grad && layout.param == layout.state &&
                         element_size(layout.param) == sizeof(typename L::scalar);
    if (is_wide && i < end) {
      update(Part<L>{{}, static_cast<int>(end - i)});
      return;
    }
  }
  for (; i < end; ++i) {
    update(Scalar{});
  }
}

// The same, noting what it added to each weight as it is stored, from the first-level cache.
// Returns how many weights stayed although something was to be added.
template <class L>
[[gnu::always_inline]] inline int64_t adam_traced_loop(
    const AdamScalars<typename L::scalar>& scalars, const Layout& layout, const StepMode& mode,
    const TensorWork& work, int64_t begin, int64_t end, const Draws* draws,
    typename L::scalar* change) {
  const AdamScalars<typename L::scalar> s = scalars;
  const TensorWork copy = work;
  const auto& x = copy.memory;
  int64_t lost = 0;
  int64_t i = begin;
  const auto update = [&](const auto& lane) __attribute__((always_inline)) {
    using Lane = std::decay_t<decltype(lane)>;
    const auto before = load_weight(lane, layout, x, i);
    adam_register(lane, s, layout, mode, x, i, draws, i - begin);
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

// Calls body(first, last, draws) for elements [begin, end) of a tensor that rounds randomly, run by
// run of those that share a stream and follow one another.
template <class Body>
[[gnu::always_inline]] inline void for_each_stream(const TensorWork& work,
                                                   const StepOptions& options, int64_t begin,
                                                   int64_t end, const Body& body) {
  const RoundingKey key{options.rounding_seed,
                        static_cast<uint32_t>(static_cast<int64_t>(step_of(work))), work.index};
  for (int64_t i = begin; i < end;) {
    const auto number = static_cast<uint64_t>(global_element(work, i));
    const int64_t same_stream = (int64_t{1} << 32) - static_cast<int64_t>(number & 0xffffffffu);
    const int64_t run = work.run == 0 ? end - i : work.run - i % work.run;
    int64_t last = i + (run < same_stream ? run : same_stream);
    last = last < end ? last : end;
    body(i, last, Draws{rounding_stream(key, number), static_cast<uint32_t>(number)});
    i = last;
  }
}

}  // namespace
}  // namespace torchopt_ext

// The loop of pass B over elements of one tensor: runs kernels/step.h register by register.
#pragma once

#include "cpu/fetch_ahead.h"
#include "kernels/step.h"

namespace torchopt_ext {
namespace {

// A lane that accesses only the first n elements of a register, n < L::width. Without it, the tail
// of a small tensor would spend much time on scalar square roots and divisions.
template <class L>
struct PartialRegister : L {
  static constexpr bool converts = false;
  static constexpr bool has_narrow_types = false;
  typename L::reg load(const typename L::scalar* x) const { return L::load_part(x, n); }
  void store(typename L::scalar* x, typename L::reg a) const { L::store_part(x, a, n); }
  int n;
};

// The prefetch distance. Hardware prefetchers stop at the end of a page, which all of the four or
// five arrays may reach together. On a Zen 4, 512 bytes made the loop 10 to 15 % faster for tensors
// of any type that only memory holds; 256 and 768 bytes gave about half of that gain. On an Intel
// Xeon of 2023 all distances up to 8,192 bytes are equally fast.
inline constexpr int64_t kBytesAhead = 512;

// Prefetches n elements of each array, kBytesAhead bytes after element i.
template <class L>
[[gnu::always_inline]] inline void prefetch_arrays(const Layout& layout, const StepMode& mode,
                                                   void* const (&x)[kArrays], int64_t i, int n) {
  const auto ahead = [&](Array array) __attribute__((always_inline)) {
    const int64_t size = element_size(layout, array);
    prefetch_lines<L>(x[array], size * i + kBytesAhead, size * n);
  };
  for_each_written(
      layout, [&](Array array) __attribute__((always_inline)) {
        if (array != kParam || !mode.past_caches) {
          ahead(array);
        }
      });
  ahead(kGrad);
}

// The source of the random bits of elements with consecutive numbers.
struct Draws {
  RoundingStream stream;
  uint32_t first;  // the lower half of the first element's number

  // Returns the bits of a register that begins at the i-th of these elements.
  template <class L>
  typename L::Random of(int64_t i) const {
    return L::random(stream, first + static_cast<uint32_t>(i));
  }
};

// Tracking inside the loops (kernels/trace.h): records the change of each stored weight and counts
// the lost updates, which leave their weight unchanged. `change` first holds the weights before the
// update, then their changes. Its first element belongs to element `origin` of the tensor.
template <class Scalar>
class LoopTrace {
 public:
  LoopTrace(int64_t origin, Scalar* change) : origin_(origin), change_(change) {}

  template <class L>
  [[gnu::always_inline]] void before(const ElementsAt<L>& at) const {
    at.lane.store(change_ + (at.i - origin_), at.weight());
  }
  template <class L>
  [[gnu::always_inline]] void after(const ElementsAt<L>& at, bool decays) {
    Scalar* const change = change_ + (at.i - origin_);
    const auto before = at.lane.load(change);
    const auto after = at.weight();
    at.lane.store(change, L::sub(after, before));
    lost_ += L::count_lost(before, after, at.mover(), decays);
  }
  int64_t lost() const { return lost_; }

 private:
  int64_t origin_;
  Scalar* change_;
  int64_t lost_ = 0;
};

// The trace of a step without tracking: both calls are no-ops.
struct NoTrace {
  void before(const auto&... /*register*/) const {}
  void after(const auto&... /*register*/) const {}
};

// Updates elements [begin, end). Elements that do not fill a register of L are updated by registers
// of Tail, which may hold one element, by a part of a register, or one by one. `draws` begins at
// element `begin`, or is null. Inlined into every caller, so that the compiler removes branches on
// a constant layout or mode.
template <class A, class L, class Tail, class Trace>
[[gnu::always_inline]] inline void update_loop(const Scalars<typename L::scalar>& scalars,
                                               const Layout& layout, const StepMode& mode,
                                               const TensorWork& work, int64_t begin, int64_t end,
                                               const Draws* draws, Trace&& trace) {
  using Scalar = ScalarLane<typename L::scalar>;
  const Scalars<typename L::scalar> s = scalars;
  const TensorWork copy = work;  // stays in registers: stores may alias `work`
  const auto& x = copy.memory;
  int64_t i = begin;
  const auto update = [&](const auto& lane) __attribute__((always_inline)) {
    using Lane = std::remove_cvref_t<decltype(lane)>;
    const ElementsAt<Lane> at{lane, layout, x, i};
    trace.before(at);
    if constexpr (Lane::has_narrow_types) {
      const auto random = draws != nullptr ? draws->of<Lane>(i - begin) : typename Lane::Random{};
      update_elements<A>(at, s, mode, draws != nullptr ? &random : nullptr);
    } else {
      update_elements<A>(at, s, mode, static_cast<const Draws*>(nullptr));
    }
    trace.after(at, s.has_decay);
  };
  if (mode.past_caches) {  // until a register of the parameter is aligned
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
    prefetch_arrays<L>(layout, mode, x, i, L::width);
    update(L{});
  }
  if constexpr (Tail::width > 1) {
    for (; i + Tail::width <= end; i += Tail::width) {
      update(Tail{});
    }
  }
  if constexpr (requires { L::load_part; }) {
    const bool is_wide = layout.param == layout.grad && layout.param == layout.state &&
                         element_size(layout.param) == sizeof(typename L::scalar);
    if (is_wide && i < end) {
      update(PartialRegister<L>{{}, static_cast<int>(end - i)});
      return;
    }
  }
  for (; i < end; ++i) {
    update(Scalar{});
  }
}

}  // namespace
}  // namespace torchopt_ext

// The exact accumulator (kernels/exact_accumulator.h) in the registers of a warp: thread t owns
// slots 3t to 3t + 2. A slot is a limb or a counter.
#pragma once

#include "cuda/cta.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

struct ThreadSlots {
  static constexpr int kPerThread = 3;
  int64_t value[kPerThread];
};

namespace {

template <class Warp>
using WarpSlots = typename Warp::template PerThread<ThreadSlots>;

// Calls f(slot's number, slot) for each slot of the warp.
template <class Warp, class F>
TORCHOPT_HD inline void each_slot(const Warp& warp, WarpSlots<Warp>& slots, const F& f) {
  warp.each([&](int thread) {
    for (int j = 0; j < ThreadSlots::kPerThread; ++j) {
      const int k = ThreadSlots::kPerThread * thread + j;
      if (k < ExactAccumulator::kSize) {
        f(k, slots[thread].value[j]);
      }
    }
  });
}

// Normalizes to the same digits as accumulator_normalize. A round carries through each thread's
// limbs, then into the next thread. Few carries go further, but a borrow may go through all.
template <class Warp>
TORCHOPT_HD inline void warp_normalize(const Warp& warp, WarpSlots<Warp>& slots) {
  constexpr int kTop = ExactAccumulator::kLimbs - 1;
  typename Warp::template PerThread<int64_t> carry{};
  typename Warp::template PerThread<uint32_t> carries;
  do {
    warp.each([&](int thread) {
      int64_t c = carry[thread];
      for (int j = 0; j < ThreadSlots::kPerThread; ++j) {
        const int k = ThreadSlots::kPerThread * thread + j;
        int64_t& limb = slots[thread].value[j];
        if (k < kTop) {
          limb += c;
          c = limb >> 32;
          limb &= 0xffffffff;
        } else if (k == kTop) {
          limb += c;
          c = 0;
        }
      }
      carry[thread] = c;
      carries[thread] = c != 0 ? 1 : 0;
    });
    warp.shift(carry);
  } while (warp_max<Warp>(carries) != 0);
}

template <class Warp>
TORCHOPT_HD inline WarpSlots<Warp> load_slots(const Warp& warp, const int64_t* accumulator) {
  WarpSlots<Warp> slots;
  each_slot(warp, slots, [&](int k, int64_t& slot) { slot = accumulator[k]; });
  return slots;
}

// Returns accumulator_total to the leader. `limbs` is memory that the warp shares.
template <class Warp>
TORCHOPT_HD inline double warp_total(const Warp& warp, const int64_t* accumulator,
                                     int64_t (&limbs)[ExactAccumulator::kSize]) {
  constexpr int kTop = ExactAccumulator::kLimbs - 1;
  WarpSlots<Warp> slots = load_slots(warp, accumulator);
  const auto share = [&] {
    warp_normalize(warp, slots);
    each_slot(warp, slots, [&](int k, int64_t slot) { limbs[k] = slot; });
  };
  share();
  const bool has_nan = limbs[ExactAccumulator::kNans] != 0;
  if (has_nan || limbs[ExactAccumulator::kInfinities] != 0) {
    return nonfinite_total(has_nan);
  }
  const bool negative = limbs[kTop] < 0;
  if (negative) {
    each_slot(warp, slots, [](int, int64_t& slot) { slot = -slot; });
    share();
  }
  // The highest and the lowest limb that are not 0.
  typename Warp::template PerThread<uint32_t> high;
  typename Warp::template PerThread<uint32_t> low;
  warp.each([&](int thread) {
    high[thread] = 0;
    low[thread] = 0;
    for (int k = ThreadSlots::kPerThread * thread;
         k < ThreadSlots::kPerThread * (thread + 1) && k <= kTop; ++k) {
      if (limbs[k] != 0) {
        high[thread] = static_cast<uint32_t>(k);
        const auto from_top = static_cast<uint32_t>(kTop - k);
        low[thread] = from_top > low[thread] ? from_top : low[thread];
      }
    }
  });
  const int top = static_cast<int>(warp_max<Warp>(high));
  const int bottom = kTop - static_cast<int>(warp_max<Warp>(low));
  return rounded(limbs, negative, top, bottom < top - 2);
}

}  // namespace
}  // namespace torchopt_ext

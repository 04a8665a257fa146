// The loop of pass B over elements with 8-bit moments (kernels/quantized_step.h). Moments stay in
// the L1 cache until the scales of their group are known.
//
// The weights of a group are updated after the moments of the next group are averaged. Square roots
// have a low throughput: in this order they overlap with other work and nothing waits for them (5 %
// faster in cache on an Intel Xeon of 2023). There the number of vector operations bounds the loop,
// so some are left out of groups that do not need them.
#pragma once

#include <utility>

#include "cpu/quantized_groups.h"
#include "kernels/quantized_adam.h"

namespace torchopt_ext {
namespace {

// Updates elements [begin, end), which are whole groups. With kWhole every group has kQuantGroup
// elements and needs no bookkeeping. `key` is for random bits, if the mode asks for them.
template <class A, class L, bool kWhole, class Trace>
[[gnu::always_inline]] inline void quantized_loop(const Scalars<float>& scalars,
                                                  const Layout& layout, const StepMode& mode,
                                                  const TensorWork& tensor, int64_t begin,
                                                  int64_t end, const RoundingKey& key,
                                                  Trace& trace) {
  using Scalar = ScalarLane<float>;
  using Single = typename L::SingleLane;
  // Whether exp_avg's largest magnitudes are found as if it had no NaN, which takes fewer
  // operations. It has one only where the group's root is NaN or infinite, or its own scale is.
  constexpr bool kOfNumbers = kMoments<A> == 2 && requires { Single::max_of_numbers; };
  const QuantizedScalars<A> quantized(scalars);
  const QuantizedStep<A, L> step(quantized);
  const TensorWork work = tensor;  // stays in registers: stores may alias `tensor`
  const GroupDither<A, L> group_dither(work);
  const bool random_weights = mode.rounds && weight_may_round_randomly(layout);
  const auto scales = [&](int moment) __attribute__((always_inline)) {
    return static_cast<float*>(work.memory[scale_array(moment)]);
  };
  GroupDraws draws(key);
  ShortGroups shorts;
  BufferedMoment<L> kept[kMoments<A>];

  struct Group {
    int64_t first;  // first element, in the tensor
    int size;
    int64_t at;  // first element, in `memory`
    void* const (*memory)[kArrays];
  };
  Group groups[kWhole ? 1 : kGroupsAtOnce];
  int64_t first = begin;                  // first element of the groups that are updated together
  int64_t index = group_of(work, begin);  // index of the first group's scales
  const auto group_at = [&](int g) __attribute__((always_inline)) {
    const int64_t i = first + int64_t{g} * kQuantGroup;
    return kWhole ? Group{i, kQuantGroup, i, &work.memory} : groups[g];
  };

  const auto elements_at = [&](const Group& group, int k) __attribute__((always_inline)) {
    return ElementsAt<L>{{}, layout, *group.memory, group.at + k};
  };
  // Visits each register of a full group or each element of a short group, in the tensor.
  const auto for_each_traced = [&](const Group& group, const auto& visit)
      __attribute__((always_inline)) {
    if (group.size == kQuantGroup) {
      for (int k = 0; k < kQuantGroup; k += L::width) {
        visit(ElementsAt<L>{{}, layout, work.memory, group.first + k});
      }
    } else {
      for (int k = 0; k < group.size; ++k) {
        visit(ElementsAt<Scalar>{{}, layout, work.memory, group.first + k});
      }
    }
  };
  const auto kept_moments = [&](int g, int k) __attribute__((always_inline)) {
    Moments<A, L> moments;
    for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
      moments.of[moment] = L::load_temporary(kept[moment].value[g] + k);
    });
    return moments;
  };
  const auto decoding_of = [&](int g) __attribute__((always_inline)) {
    PerMoment<A, float> decoding;
    for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
      decoding.of[moment] = kept[moment].decoding[g];
    });
    return decoding;
  };
  const auto largest_root = Single::set1(step.largest_root());
  // Returns whether update_weights() has to clamp divisors.
  const auto average = [&](int g) __attribute__((always_inline))->bool {
    const Group group = group_at(g);
    const PerMoment<A, float> decoding = decoding_of(g);
    PerMoment<A, typename Single::reg> most{};
    for (int k = 0; k < kQuantGroup; k += L::width) {
      const Moments<A, L> now = step.averaged(elements_at(group, k), decoding);
      for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
        const auto value = now.of[moment];
        L::store_temporary(kept[moment].value[g] + k, value);
        const auto magnitude = magnitude_of < L, kIsRoot<A, moment>,
                   kOfNumbers && moment == 0 > (value);
        most.of[moment] = k == 0 ? magnitude : Single::max_magnitude(most.of[moment], magnitude);
      });
    }
    for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
      kept[moment].set_largest(g, most.of[moment]);
    });
    if constexpr (kMoments<A> == 2) {
      return !Single::all_at_most(most.of[1], largest_root);
    }
    return true;
  };
  const auto update_weights = [&](int g, bool clamps) __attribute__((always_inline)) {
    const Group group = group_at(g);
    for_each_traced(
        group, [&](const auto& at) __attribute__((always_inline)) { trace.before(at); });
    if (random_weights) {
      draws.start(static_cast<uint64_t>(global_element(work, group.first)));
    }
    const PerMoment<A, float> decoding = decoding_of(g);
    const auto updated_at = [&](int k) __attribute__((always_inline)) {
      return step.weights(elements_at(group, k), decoding, kept_moments(g, k), clamps);
    };
    if (layout.master == Master::kRemainder8 && !mode.rounds) {
      for (int k = 0; k < kQuantGroup; k += 2 * L::width) {
        const ElementsAt<L> at = elements_at(group, k);
        const auto weights = updated_at(k);
        L::store_split(at.template address<BFloat16>(kParam), at.template address<int8_t>(kMaster),
                       weights, updated_at(k + L::width));
      }
    } else {
      for (int k = 0; k < kQuantGroup; k += L::width) {
        const auto drawn = random_weights ? draws.of<L>(k) : typename L::Random{};
        store_updated<A>(elements_at(group, k), updated_at(k), mode,
                         random_weights ? &drawn : nullptr);
      }
    }
    for (int k = 0; mode.write_back && k < kQuantGroup; k += L::width) {
      const ElementsAt<L> at = elements_at(group, k);
      at.store_scaled_gradient(at.gradient(), scalars.grad_factor);
    }
  };
  const auto store = [&](int g) __attribute__((always_inline)) {
    const Group group = group_at(g);
    if (mode.rounds) {
      draws.start(static_cast<uint64_t>(global_element(work, group.first)));
    }
    const auto codes = [&](int k) __attribute__((always_inline)) {
      const auto drawn = mode.rounds ? draws.of<L>(k) : typename L::Random{};
      Moments<A, L> moments = kept_moments(g, k);
      for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
        const auto added = mode.rounds ? random_offset<A, moment, L>(drawn)
                                       : L::load_temporary(group_dither.of[moment] + k);
        moments.of[moment] = L::fma(moments.of[moment], L::set1(kept[moment].inverse[g]), added);
      });
      return moments;
    };
    for (int k = 0; k < kQuantGroup; k += 2 * L::width) {
      const Moments<A, L> one = codes(k);
      const Moments<A, L> other = codes(k + L::width);
      const ElementsAt<L> at = elements_at(group, k);
      for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
        L::store_codes(at.template address<CodeOf<A, moment>>(state_array(moment)), one.of[moment],
                       other.of[moment]);
      });
    }
    if (group.size < kQuantGroup) {
      shorts.store(g, layout, mode, work.memory, group.first, group.size);
    }
    for_each_traced(
        group, [&](const auto& at)
                   __attribute__((always_inline)) { trace.after(at, scalars.has_decay); });
  };

  int64_t left = work.row_length - begin % work.row_length;  // elements left in the row
  auto groups_left = static_cast<int>(group_of(work, end - 1) + 1 - index);
  while (groups_left > 0) {
    const int count = groups_left < kGroupsAtOnce ? groups_left : kGroupsAtOnce;
    for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
      kept[moment].load_scales(scales(moment) + index, count, quantized.decoding.of[moment]);
    });
    int64_t next = first;
    bool clamps = true;  // in the last averaged group
    for (int g = 0; g < count; ++g) {
      const int size = kWhole || left >= kQuantGroup ? kQuantGroup : static_cast<int>(left);
      if (size == kQuantGroup) {
        prefetch_arrays<L>(layout, mode, work.memory, next, kQuantGroup);
      }
      if constexpr (!kWhole) {
        if (size == kQuantGroup) {
          groups[g] = {next, size, next, &work.memory};
        } else {
          shorts.load(g, layout, work.memory, next, size);
          groups[g] = {next, size, int64_t{g} * kQuantGroup, &shorts.memory};
        }
        left = left == size ? work.row_length : left - size;
      }
      next += size;
      const bool clamped = std::exchange(clamps, average(g));
      if (g > 0) {
        update_weights(g - 1, clamped);
      }
    }
    update_weights(count - 1, clamps);
    for_each_moment<A>([&](auto moment)
                           __attribute__((always_inline)) { kept[moment].find_largest(count); });
    if constexpr (kOfNumbers) {
      static_assert(Single::width == kGroupsAtOnce);
      const auto magnitudes = Single::max_magnitude(Single::load(kept[1].largest),
                                                    Single::abs(Single::load(kept[0].decoding)));
      if (!Single::all_at_most(magnitudes, Single::set1(largest_finite<float>))) {
        kept[0].find_largest_or_nan(count);
      }
    }
    for_each_moment<A>([&](auto moment) __attribute__((always_inline)) {
      kept[moment].find_scales(scales(moment) + index, count, kCodes<A, moment>,
                               quantized.units.of[moment]);
    });
    for (int g = 0; g < count; ++g) {
      store(g);
    }
    first = next;
    index += count;
    groups_left -= count;
  }
}

}  // namespace
}  // namespace torchopt_ext

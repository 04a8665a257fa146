// The loop of pass B over elements with moments of 8 bits: kernels/quantized_step.h. Moments stay
// in the first-level cache until the scales of their group are known.
//
// A group's weights move while the next group's moments are averaged, and are stored one group
// later still: roots and divisions, which take most of the time, then have other work beside them
// and nothing that waits for them (7 % faster on an Intel Xeon of 2023).
#pragma once

#include "cpu/quantized_groups.h"
#include "kernels/quantized_step.h"

namespace torchopt_ext {
namespace {

// Asks for what the loop comes to after the group that begins at element i, once a line.
template <class L>
[[gnu::always_inline]] inline void fetch_group_ahead(const Layout& layout,
                                                     void* const (&x)[kArrays], int64_t i) {
  constexpr Array kRead[] = {kParam, kExpAvg, kExpAvgSq, kMaster, kGrad};
  for (const Array array : kRead) {
    if (array == kMaster && layout.master == Master::kNone) {
      continue;
    }
    const int64_t size = element_size(layout, array);
    fetch_lines_ahead<L>(x[array], i * size, kQuantGroup * size);
  }
}

// Elements [begin, end), whole groups. Rounded at random if `key` is not null.
template <class L, class Trace>
[[gnu::always_inline]] inline void quantized_loop(const AdamScalars<float>& scalars,
                                                  const Layout& layout, const StepMode& mode,
                                                  const TensorWork& tensor, int64_t begin,
                                                  int64_t end, const RoundingKey* key,
                                                  Trace& trace) {
  using Scalar = ScalarLane<float>;
  constexpr L lane;
  const QuantizedFactors<L> factors = quantized_factors<L>(scalars);
  const TensorWork work = tensor;  // stays in registers: a store might change `tensor`
  const Added<L> added(work);
  const bool random_weights = weight_may_round_randomly(layout);
  auto* exp_avg_scales = static_cast<float*>(work.memory[kExpAvgScale]);
  auto* root_scales = static_cast<float*>(work.memory[kExpAvgSqScale]);
  GroupDraws draws(key != nullptr ? *key : RoundingKey{});
  ShortGroups shorts;
  Each<KeptMoment<L>> kept;
  alignas(64) float weights[2][kQuantGroup];  // of a group, and of the one before

  struct Group {
    int64_t first;  // element of the tensor
    int64_t index;  // of its scales
    int size;
    int64_t at;  // its place in `memory`
    void* const (*memory)[kArrays];
  };
  Group groups[kGroupsAtOnce];

  const auto start = [&](const Group& group) __attribute__((always_inline)) {
    if (key != nullptr || Trace::needs_numbers) {
      const auto number = static_cast<uint64_t>(global_element(work, group.first));
      draws.start(number);
      trace.start_group(layout, work, group.first, number);
    }
  };
  // visit(lane, element) of what tracking sees.
  const auto for_each_traced = [&](const Group& group, const auto& visit)
      __attribute__((always_inline)) {
    if (group.size == kQuantGroup) {
      for (int k = 0; k < kQuantGroup; k += L::width) {
        visit(lane, group.first + k);
      }
    } else {
      for (int k = 0; k < group.size; ++k) {
        visit(Scalar{}, group.first + k);
      }
    }
  };
  // visit(null or the random bits of a register's elements).
  const auto with_draws = [&](bool random, int k, const auto& visit)
      __attribute__((always_inline)) {
    if (key != nullptr && random) {
      const auto drawn = draws.of<L>(k);
      visit(&drawn);
    } else {
      visit(static_cast<const typename L::Random*>(nullptr));
    }
  };
  const auto kept_moments = [&](int g, int k) __attribute__((always_inline)) {
    return Moments<L>{L::kept(kept.exp_avg.value[g] + k), L::kept(kept.root.value[g] + k)};
  };
  const auto average = [&](int g) __attribute__((always_inline)) {
    const Group group = groups[g];
    const Moments<L> decoding =
        decoding_of(factors, {exp_avg_scales[group.index], root_scales[group.index]});
    Moments<L> most;
    for (int k = 0; k < kQuantGroup; k += L::width) {
      const Moments<L> now = averaged(lane, factors, layout, *group.memory, group.at + k, decoding);
      L::keep(kept.exp_avg.value[g] + k, now.exp_avg);
      L::keep(kept.root.value[g] + k, now.root);
      const Moments<L> magnitudes{L::abs(now.exp_avg), now.root};
      most = k == 0 ? magnitudes
                    : Moments<L>{L::max_magnitude(most.exp_avg, magnitudes.exp_avg),
                                 L::max_magnitude(most.root, magnitudes.root)};
    }
    kept.exp_avg.set_largest(g, most.exp_avg);
    kept.root.set_largest(g, most.root);
  };
  const auto move = [&](int g) __attribute__((always_inline)) {
    const Group group = groups[g];
    for_each_traced(
        group, [&](const auto& one, int64_t i)
                   __attribute__((always_inline)) { trace.before(one, layout, work.memory, i); });
    for (int k = 0; k < kQuantGroup; k += L::width) {
      L::keep(weights[g % 2] + k,
              moved(lane, factors, layout, *group.memory, group.at + k, kept_moments(g, k)));
    }
  };
  const auto store_weights = [&](int g) __attribute__((always_inline)) {
    const Group group = groups[g];
    if (key != nullptr && random_weights) {
      draws.start(static_cast<uint64_t>(global_element(work, group.first)));
    }
    for (int k = 0; k < kQuantGroup; k += L::width) {
      with_draws(
          random_weights, k, [&](const auto* random) __attribute__((always_inline)) {
            store_moved(lane, factors, layout, mode, *group.memory, group.at + k,
                        L::kept(weights[g % 2] + k), random);
          });
    }
  };
  const auto store = [&](int g) __attribute__((always_inline)) {
    const Group group = groups[g];
    start(group);
    exp_avg_scales[group.index] = kept.exp_avg.scale[g];
    root_scales[group.index] = kept.root.scale[g];
    const GroupScales inverse{kept.exp_avg.inverse[g], kept.root.inverse[g]};
    for (int k = 0; k < kQuantGroup; k += L::width) {
      with_draws(
          true, k, [&](const auto* random) __attribute__((always_inline)) {
            store_moments(
                lane, *group.memory, group.at + k, kept_moments(g, k),
                inverse, [&](Array array) __attribute__((always_inline)) {
                  if (random != nullptr) {
                    return added_at_random<L>(*random, array);
                  }
                  return L::kept((array == kExpAvg ? added.exp_avg : added.root) + k);
                });
          });
    }
    if (group.size < kQuantGroup) {
      shorts.store(g, layout, mode, work.memory, group.first, group.size);
    }
    for_each_traced(
        group, [&](const auto& one, int64_t i) __attribute__((always_inline)) {
          trace.after(one, layout, work.memory, i, factors.has_decay);
        });
    trace.stored_group(layout, work.memory, group.first, group.size);
    trace.stored_scales(work.memory, group.first, group.index);
  };

  int64_t index = group_of(work, begin);
  int64_t left = work.row_length - begin % work.row_length;  // of the row
  for (int64_t i = begin; i < end;) {
    int count = 0;
    for (; i < end && count < kGroupsAtOnce; ++count, ++index) {
      const int size = left < kQuantGroup ? static_cast<int>(left) : kQuantGroup;
      Group& group = groups[count];
      if (size == kQuantGroup) {
        fetch_group_ahead<L>(layout, work.memory, i);
        group = {i, index, size, i, &work.memory};
      } else {
        shorts.load(count, layout, work.memory, i, size);
        group = {i, index, size, count * kQuantGroup, &shorts.memory};
      }
      i += size;
      left = left == size ? work.row_length : left - size;
      average(count);
      if (count > 0) {
        move(count - 1);
      }
      if (count > 1) {
        store_weights(count - 2);
      }
    }
    move(count - 1);
    if (count > 1) {
      store_weights(count - 2);
    }
    store_weights(count - 1);
    kept.exp_avg.find_scales(kLargestCode);
    kept.root.find_scales(kRootCodes);
    for (int g = 0; g < count; ++g) {
      store(g);
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

// The loop of pass B over elements with 8-bit moments (kernels/quantized_step.h). Moments stay in
// the L1 cache until the scales of their group are known.
//
// The weights of a group are updated after the moments of the next group are averaged. Square roots
// have a low throughput: in this order they overlap with other work and nothing waits for them (5 %
// faster in cache on an Intel Xeon of 2023).
#pragma once

#include "cpu/quantized_groups.h"
#include "kernels/quantized_step.h"

namespace torchopt_ext {
namespace {

// Updates elements [begin, end), which are whole groups. With kWhole every group has kQuantGroup
// elements and needs no bookkeeping. `key` is for random bits, if the mode asks for them.
template <class L, bool kWhole, class Trace>
[[gnu::always_inline]] inline void quantized_loop(const AdamScalars<float>& scalars,
                                                  const Layout& layout, const StepMode& mode,
                                                  const TensorWork& tensor, int64_t begin,
                                                  int64_t end, const RoundingKey& key,
                                                  Trace& trace) {
  using Scalar = ScalarLane<float>;
  const QuantizedFactors<L> factors{quantized_scalars(scalars)};
  const TensorWork work = tensor;  // stays in registers: stores may alias `tensor`
  const GroupDither<L> group_dither(work);
  const bool random_weights = mode.rounds && weight_may_round_randomly(layout);
  auto* exp_avg_scales = static_cast<float*>(work.memory[kExpAvgScale]);
  auto* root_scales = static_cast<float*>(work.memory[kExpAvgSqScale]);
  GroupDraws draws(key);
  ShortGroups shorts;
  PerMoment<BufferedMoment<L>> kept;

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
    return Moments<L>{L::load_temporary(kept.exp_avg.value[g] + k),
                      L::load_temporary(kept.root.value[g] + k)};
  };
  const auto average = [&](int g) __attribute__((always_inline)) {
    const Group group = group_at(g);
    const PerMoment<float> decoding{kept.exp_avg.decoding[g], kept.root.decoding[g]};
    Moments<L> most{};
    for (int k = 0; k < kQuantGroup; k += L::width) {
      const Moments<L> now = average_moments(elements_at(group, k), factors, decoding);
      L::store_temporary(kept.exp_avg.value[g] + k, now.exp_avg);
      L::store_temporary(kept.root.value[g] + k, now.root);
      const Moments<L> magnitudes{L::abs(now.exp_avg), now.root};
      most = k == 0 ? magnitudes
                    : Moments<L>{L::max_magnitude(most.exp_avg, magnitudes.exp_avg),
                                 L::max_magnitude(most.root, magnitudes.root)};
    }
    kept.exp_avg.set_largest(g, most.exp_avg);
    kept.root.set_largest(g, most.root);
  };
  const auto update_weights = [&](int g) __attribute__((always_inline)) {
    const Group group = group_at(g);
    for_each_traced(
        group, [&](const auto& at) __attribute__((always_inline)) { trace.before(at); });
    if (random_weights) {
      draws.start(static_cast<uint64_t>(global_element(work, group.first)));
    }
    const auto updated_at = [&](int k) __attribute__((always_inline)) {
      return updated_weights(elements_at(group, k), factors, kept_moments(g, k));
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
        elements_at(group, k).store_weight(updated_at(k), mode, random_weights ? &drawn : nullptr);
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
    const PerMoment<float> inverse{kept.exp_avg.inverse[g], kept.root.inverse[g]};
    const auto codes = [&](int k) __attribute__((always_inline)) {
      const auto drawn = mode.rounds ? draws.of<L>(k) : typename L::Random{};
      return encode_moments<L>(
          kept_moments(g, k), inverse, [&](Array array) __attribute__((always_inline)) {
            return mode.rounds
                       ? random_offset<L>(drawn, array)
                       : L::load_temporary(
                             (array == kExpAvg ? group_dither.exp_avg : group_dither.root) + k);
          });
    };
    for (int k = 0; k < kQuantGroup; k += 2 * L::width) {
      const Moments<L> one = codes(k);
      const Moments<L> other = codes(k + L::width);
      const ElementsAt<L> at = elements_at(group, k);
      L::store_codes(at.template address<int8_t>(kExpAvg), one.exp_avg, other.exp_avg);
      L::store_codes(at.template address<uint8_t>(kExpAvgSq), one.root, other.root);
    }
    if (group.size < kQuantGroup) {
      shorts.store(g, layout, mode, work.memory, group.first, group.size);
    }
    for_each_traced(
        group, [&](const auto& at)
                   __attribute__((always_inline)) { trace.after(at, factors.scalars.has_decay); });
  };

  int64_t left = work.row_length - begin % work.row_length;  // elements left in the row
  auto groups_left = static_cast<int>(group_of(work, end - 1) + 1 - index);
  while (groups_left > 0) {
    const int count = groups_left < kGroupsAtOnce ? groups_left : kGroupsAtOnce;
    kept.exp_avg.load_scales(exp_avg_scales + index, count, factors.scalars.decoding.exp_avg);
    kept.root.load_scales(root_scales + index, count, factors.scalars.decoding.root);
    int64_t next = first;
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
      average(g);
      if (g > 0) {
        update_weights(g - 1);
      }
    }
    update_weights(count - 1);
    kept.exp_avg.find_scales(exp_avg_scales + index, count, kLargestCode,
                             factors.scalars.units.exp_avg);
    kept.root.find_scales(root_scales + index, count, kRootCodes, factors.scalars.units.root);
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

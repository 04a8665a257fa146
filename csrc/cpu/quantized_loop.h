// The loop of pass B over elements with moments of 8 bits: kernels/quantized_step.h. Moments stay
// in the first-level cache until the scales of their group are known.
#pragma once

#include "cpu/adam_loop.h"
#include "kernels/quantized_step.h"

namespace torchopt_ext {
namespace {

// Asks for what the loop comes to after the group that begins at element i, once a line.
template <class L>
[[gnu::always_inline]] inline void fetch_group_ahead(const Layout& layout,
                                                     void* const (&x)[kArrays], int64_t i) {
  constexpr int64_t kLine = 64;
  constexpr Array kRead[] = {kParam, kExpAvg, kExpAvgSq, kMaster, kGrad};
  for (const Array array : kRead) {
    if (array == kMaster && layout.master == Master::kNone) {
      continue;
    }
    const int64_t size = element_size(layout, array);
    for (int64_t at = 0; at < kQuantGroup * size; at += kLine) {
      fetch_ahead<L>(x[array], i * size + at);
    }
  }
}

// The random bits of a group, all of whose elements take the stream of the first one.
class GroupDraws {
 public:
  explicit GroupDraws(const RoundingKey& key) : key_(key) {}

  void start(uint64_t number) {
    if (number >> kStreamBits != upper_) {
      upper_ = number >> kStreamBits;
      draws_.stream = rounding_stream(key_, number);
    }
    draws_.first = static_cast<uint32_t>(number);
  }
  template <class L>
  typename L::Random of(int64_t i) const {
    return L::random(draws_.stream, draws_.first + static_cast<uint32_t>(i));
  }

 private:
  RoundingKey key_;
  uint64_t upper_ = ~uint64_t{0};
  Draws draws_{};
};

// Groups whose moments are kept until their scales are known: several, so that these are found
// together.
inline constexpr int kGroupsAtOnce = 16;

// One moment of them between the two parts of a step.
template <class L>
struct KeptMoment {
  using One = typename L::One;

  [[gnu::always_inline]] void set_most(int group, typename L::reg a, float rest) {
    most[group / One::width][group % One::width] =
        One::max_magnitude(L::folded(a), One::set1(rest));
  }
  [[gnu::always_inline]] void find_scales(float codes) {
    for (int g = 0; g < kGroupsAtOnce; g += One::width) {
      One::largest(most[g / One::width], scale + g);
      const auto scales = scales_of<One>(One::load(scale + g), codes);
      One::store(scale + g, scales);
      One::store(inverse + g, inverses_of<One>(scales));
    }
  }

  alignas(64) float value[kGroupsAtOnce][kQuantGroup];
  // A register of a group each, whose largest element is the group's.
  typename One::reg most[kGroupsAtOnce / One::width][One::width] = {};
  alignas(64) float scale[kGroupsAtOnce];
  alignas(64) float inverse[kGroupsAtOnce];
};

// What is added to the codes of a group: dither.
struct Added {
  alignas(64) float exp_avg[kQuantGroup];
  alignas(64) float root[kQuantGroup];
};

inline Added dithers(const TensorWork& work) {
  const auto step = static_cast<uint32_t>(static_cast<int64_t>(step_of(work)));
  Added added;
  for (int k = 0; k < kQuantGroup; ++k) {
    added.exp_avg[k] = dither(kExpAvg, step, k);
    added.root[k] = dither(kExpAvgSq, step, k);
  }
  return added;
}

// In the order in which registers are kept.
template <class L>
Added in_order_kept(const Added& added) {
  Added ordered;
  for (int k = 0; k < kQuantGroup; k += L::width) {
    L::keep(ordered.exp_avg + k, L::load(added.exp_avg + k));
    L::keep(ordered.root + k, L::load(added.root + k));
  }
  return ordered;
}

// Elements [begin, end), whole groups. Rounded at random if `key` is not null.
template <class L, class Trace>
[[gnu::always_inline]] inline void quantized_loop(const AdamScalars<float>& scalars,
                                                  const Layout& layout, const StepMode& mode,
                                                  const TensorWork& work, int64_t begin,
                                                  int64_t end, const RoundingKey* key,
                                                  Trace& trace) {
  using Scalar = ScalarLane<float>;
  const AdamScalars<float> s = scalars;
  const QuantizedScalars q = quantized_scalars(s);
  const TensorWork copy = work;  // stays in registers: a store might change `work`
  const auto& x = copy.memory;
  const int64_t first_group = group_of(copy, begin);
  auto* exp_avg_scale = static_cast<float*>(x[kExpAvgScale]) + first_group;
  auto* root_scale = static_cast<float*>(x[kExpAvgSqScale]) + first_group;
  const Added added_to_one = dithers(copy);
  const Added added_to_all = in_order_kept<L>(added_to_one);
  GroupDraws draws(key != nullptr ? *key : RoundingKey{});
  const bool random_weights = weight_may_round_randomly(layout);
  Each<KeptMoment<L>> kept;
  int64_t first_of[kGroupsAtOnce];
  int size_of[kGroupsAtOnce];

  const auto start = [&](int64_t first) __attribute__((always_inline)) {
    if (key != nullptr || Trace::needs_numbers) {
      const auto number = static_cast<uint64_t>(global_element(copy, first));
      draws.start(number);
      trace.start(copy, first, number);
    }
  };
  // `size`: a constant of whole groups, so that their loops are unrolled.
  const auto for_each_register = [](auto size, const auto& visit) __attribute__((always_inline)) {
    const int whole = size / L::width * L::width;
    for (int k = 0; k < whole; k += L::width) {
      visit(L{}, k);
    }
    for (int k = whole; k < size; ++k) {
      visit(Scalar{}, k);
    }
  };
  // visit(null or the random bits of a register's elements).
  const auto with_draws = [&](auto lane, bool random, int k, const auto& visit)
      __attribute__((always_inline)) {
    using Lane = decltype(lane);
    if (key != nullptr && random) {
      const auto drawn = draws.of<Lane>(k);
      return visit(&drawn);
    }
    return visit(static_cast<const typename Lane::Random*>(nullptr));
  };
  const auto update = [&](int g, auto size) __attribute__((always_inline)) {
    const int64_t first = first_of[g];
    const GroupScales decoding = decoding_of(q, {exp_avg_scale[g], root_scale[g]});
    Moments<L> most{L::set1(0.0f), L::set1(0.0f)};
    GroupScales rest{0.0f, 0.0f};  // of the single ones
    for_each_register(
        size, [&](const auto& lane, int k) __attribute__((always_inline)) {
          using Lane = std::remove_cvref_t<decltype(lane)>;
          trace.before(lane, layout, x, first + k);
          const Moments<Lane> updated = with_draws(
              lane, random_weights, k, [&](const auto* random) __attribute__((always_inline)) {
                return update_weights(lane, s, q, layout, mode, x, first + k, decoding, random);
              });
          lane.keep(kept.exp_avg.value[g] + k, updated.exp_avg);
          lane.keep(kept.root.value[g] + k, updated.root);
          if constexpr (std::is_same_v<Lane, L>) {
            most.exp_avg = L::max_magnitude(most.exp_avg, L::abs(updated.exp_avg));
            most.root = L::max_magnitude(most.root, updated.root);
          } else {
            rest.exp_avg = Scalar::max_magnitude(rest.exp_avg, Scalar::abs(updated.exp_avg));
            rest.root = Scalar::max_magnitude(rest.root, updated.root);
          }
        });
    kept.exp_avg.set_most(g, most.exp_avg, rest.exp_avg);
    kept.root.set_most(g, most.root, rest.root);
  };
  const auto store = [&](int g, auto size) __attribute__((always_inline)) {
    const int64_t first = first_of[g];
    exp_avg_scale[g] = kept.exp_avg.scale[g];
    root_scale[g] = kept.root.scale[g];
    const GroupScales inverse{kept.exp_avg.inverse[g], kept.root.inverse[g]};
    for_each_register(
        size, [&](const auto& lane, int k) __attribute__((always_inline)) {
          using Lane = std::remove_cvref_t<decltype(lane)>;
          const Added& added = std::is_same_v<Lane, L> ? added_to_all : added_to_one;
          const Moments<Lane> moments{lane.kept(kept.exp_avg.value[g] + k),
                                      lane.kept(kept.root.value[g] + k)};
          with_draws(
              lane, true, k, [&](const auto* random) __attribute__((always_inline)) {
                store_moments(
                    lane, x, first + k, moments,
                    inverse, [&](Array array) __attribute__((always_inline)) {
                      if (random != nullptr) {
                        return added_at_random<Lane>(*random, array);
                      }
                      return Lane::kept((array == kExpAvg ? added.exp_avg : added.root) + k);
                    });
              });
          trace.after(lane, layout, x, first + k, s.has_decay);
        });
  };

  int64_t left = copy.row_length - begin % copy.row_length;  // of the row
  constexpr std::integral_constant<int, kQuantGroup> kWhole;
  for (int64_t i = begin; i < end;) {
    int groups = 0;
    for (; i < end && groups < kGroupsAtOnce; ++groups) {
      const int size = left < kQuantGroup ? static_cast<int>(left) : kQuantGroup;
      first_of[groups] = i;
      size_of[groups] = size;
      start(i);
      if (size == kQuantGroup) {
        fetch_group_ahead<L>(layout, x, i);
        update(groups, kWhole);
      } else {
        update(groups, size);
      }
      i += size;
      left = left == size ? copy.row_length : left - size;
    }
    kept.exp_avg.find_scales(kLargestCode);
    kept.root.find_scales(kRootCodes);
    for (int g = 0; g < groups; ++g) {
      start(first_of[g]);
      if (size_of[g] == kQuantGroup) {
        store(g, kWhole);
      } else {
        store(g, size_of[g]);
      }
      trace.after_group(x, group_of(copy, first_of[g]));
    }
    exp_avg_scale += groups;
    root_scale += groups;
  }
}

}  // namespace
}  // namespace torchopt_ext

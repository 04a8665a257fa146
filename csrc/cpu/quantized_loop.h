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
    if (number >> 32 != upper_) {
      upper_ = number >> 32;
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

// Groups whose moments are kept until their scales are known: several, so that the processor has
// work while it finds a scale.
inline constexpr int kGroupsAtOnce = 8;

// What is known of them between the two parts of a step.
struct KeptGroups {
  alignas(64) float exp_avg[kGroupsAtOnce][kQuantGroup];
  alignas(64) float root[kGroupsAtOnce][kQuantGroup];
  GroupScales largest[kGroupsAtOnce];
  int64_t first[kGroupsAtOnce];
  int size[kGroupsAtOnce];
};

// Elements [begin, end), whole groups. Rounded at random if `key` is not null.
template <class L, class Trace>
[[gnu::always_inline]] inline void quantized_loop(const AdamScalars<float>& scalars,
                                                  const Layout& layout, const StepMode& mode,
                                                  const TensorWork& work, int64_t begin,
                                                  int64_t end, const RoundingKey* key,
                                                  Trace& trace) {
  using Scalar = ScalarLane<float>;
  const AdamScalars<float> s = scalars;
  const TensorWork copy = work;  // stays in registers: a store might change `work`
  const auto& x = copy.memory;
  const int64_t first_group = group_of(copy, begin);
  auto* exp_avg_scale = static_cast<float*>(x[kExpAvgScale]) + first_group;
  auto* root_scale = static_cast<float*>(x[kExpAvgSqScale]) + first_group;
  alignas(64) float dithers[kQuantGroup];
  for (int k = 0; k < kQuantGroup; ++k) {
    dithers[k] = dither(static_cast<uint32_t>(static_cast<int64_t>(step_of(copy))), k);
  }
  GroupDraws draws(key != nullptr ? *key : RoundingKey{});
  const bool random_weights = weight_may_round_randomly(layout);
  KeptGroups kept;

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
  const auto update = [&](int g, auto size) __attribute__((always_inline)) {
    const int64_t first = kept.first[g];
    const GroupScales scales{exp_avg_scale[g], root_scale[g]};
    typename L::reg most_exp_avg = L::set1(0.0f);
    typename L::reg most_root = L::set1(0.0f);
    GroupScales rest{0.0f, 0.0f};  // of the single ones
    for_each_register(
        size, [&](const auto& lane, int k) __attribute__((always_inline)) {
          using Lane = std::remove_cvref_t<decltype(lane)>;
          trace.before(lane, layout, x, first + k);
          UpdatedMoments<Lane> updated;
          if (key != nullptr && random_weights) {
            const auto random = draws.of<Lane>(k);
            updated = update_weights(lane, s, layout, mode, x, first + k, scales, &random);
          } else {
            updated = update_weights(lane, s, layout, mode, x, first + k, scales,
                                     static_cast<const typename Lane::Random*>(nullptr));
          }
          lane.store(kept.exp_avg[g] + k, updated.exp_avg);
          lane.store(kept.root[g] + k, updated.root);
          if constexpr (std::is_same_v<Lane, L>) {
            most_exp_avg = L::max_magnitude(most_exp_avg, updated.exp_avg);
            most_root = L::max_magnitude(most_root, updated.root);
          } else {
            rest.exp_avg = Scalar::max_magnitude(rest.exp_avg, updated.exp_avg);
            rest.root = Scalar::max_magnitude(rest.root, updated.root);
          }
        });
    kept.largest[g] = {Scalar::max_magnitude(rest.exp_avg, L::largest(most_exp_avg)),
                       Scalar::max_magnitude(rest.root, L::largest(most_root))};
  };
  const auto store = [&](int g, auto size) __attribute__((always_inline)) {
    const int64_t first = kept.first[g];
    const GroupScales scales = scales_of(kept.largest[g].exp_avg, kept.largest[g].root);
    exp_avg_scale[g] = scales.exp_avg;
    root_scale[g] = scales.root;
    const GroupScales inverse = inverses_of(scales);
    for_each_register(
        size, [&](const auto& lane, int k) __attribute__((always_inline)) {
          using Lane = std::remove_cvref_t<decltype(lane)>;
          const UpdatedMoments<Lane> moments{lane.load(kept.exp_avg[g] + k),
                                             lane.load(kept.root[g] + k)};
          if (key != nullptr) {
            const auto random = draws.of<Lane>(k);
            store_moments(lane, x, first + k, moments, inverse, lane.load(dithers + k), &random);
          } else {
            store_moments(lane, x, first + k, moments, inverse, lane.load(dithers + k),
                          static_cast<const typename Lane::Random*>(nullptr));
          }
          trace.after(lane, layout, x, first + k, s.has_decay);
        });
  };

  int64_t left = copy.row_length - begin % copy.row_length;  // of the row
  constexpr std::integral_constant<int, kQuantGroup> kWhole;
  for (int64_t i = begin; i < end;) {
    int groups = 0;
    for (; i < end && groups < kGroupsAtOnce; ++groups) {
      const int size = left < kQuantGroup ? static_cast<int>(left) : kQuantGroup;
      kept.first[groups] = i;
      kept.size[groups] = size;
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
    for (int g = 0; g < groups; ++g) {
      start(kept.first[g]);
      if (kept.size[g] == kQuantGroup) {
        store(g, kWhole);
      } else {
        store(g, kept.size[g]);
      }
      trace.after_group(x, group_of(copy, kept.first[g]));
    }
    exp_avg_scale += groups;
    root_scale += groups;
  }
}

}  // namespace
}  // namespace torchopt_ext

// Pass B with 8-bit moments as the body of a CUDA kernel. Neighboring threads of a warp share a
// group of elements and keep its moments in registers until the group's scales are known.
#pragma once

#include "cuda/adam.h"
#include "kernels/quantized_step.h"

namespace torchopt_ext {

inline constexpr int kGroupThreads = 8;
inline constexpr int kThreadElements = kQuantGroup / kGroupThreads;
inline constexpr int kWarpGroups = kWarpThreads / kGroupThreads;

namespace {

// Returns the random bits of elements [i, i + L::width), counted from the element with this number.
// All elements use `stream`.
template <class L>
TORCHOPT_HD inline typename L::Random random_bits_of_group(const RoundingStream& stream,
                                                           uint64_t number, int i) {
  typename L::Random random;
  unrolled<L::width>([&](int k) {
    random.element[k] = random_words<ScalarWords>(
        stream, static_cast<uint32_t>(number) + static_cast<uint32_t>(i + k));
  });
  return random;
}

// Calls f(k) with k known at compile time: an index known only at run time would move an array from
// registers to local memory.
template <class F>
TORCHOPT_HD inline void at_element(int k, const F& f) {
  unrolled<kThreadElements>([&](int known) {
    if (known == k) {
      f(known);
    }
  });
}

// A chunk of a tensor with 8-bit moments.
template <AdamKind kKind>
struct QuantizedChunk {
  using Share = VectorLane<float, kThreadElements>;
  using One = VectorLane<float, 1>;

  TORCHOPT_HD QuantizedChunk(const AdamArgs& args, const Chunk& chunk)
      : elements(args, chunk),
        scalars(quantized_scalars(elements.scalars)),
        groups(elements.work, elements.n),
        first_group(group_of(elements.work, elements.begin)),
        step(static_cast<uint32_t>(static_cast<int64_t>(step_of(elements.work)))),
        exp_avg_scales(static_cast<float*>(elements.work.memory[kExpAvgScale]) + first_group),
        root_scales(static_cast<float*>(elements.work.memory[kExpAvgSqScale]) + first_group) {}

  // Updates four groups from `first` on, or as many as there are below `end`.
  template <class Warp>
  TORCHOPT_HD void update(const Warp& warp, int first, int end) const {
    typename Warp::template PerThread<Moments<Share>> moments;
    typename Warp::template PerThread<uint32_t> exp_avg;
    typename Warp::template PerThread<uint32_t> root;
    warp.each([&](int thread) {
      auto& kept = moments[thread];
      kept = {Share::set1(0.0f), Share::set1(0.0f)};
      const int group = first + thread / kGroupThreads;
      if (group < end) {
        const PerMoment<float> scales{exp_avg_scales[group], root_scales[group]};
        const bool random = weight_may_round_randomly(elements.layout);
        for_each_part(
            group, thread, random,
            [&](const auto& draws, int i) { kept = update_weights<Share>(i, scales, draws); },
            [&](const auto& draws, int i, int k) {
              const auto one = update_weights<One>(i, scales, draws);
              at_element(k, [&](int known) {
                kept.exp_avg.element[known] = one.exp_avg.element[0];
                kept.root.element[known] = one.root.element[0];
              });
            });
      }
      exp_avg[thread] = bit_cast<uint32_t>(Share::largest(kept.exp_avg));
      root[thread] = bit_cast<uint32_t>(Share::largest(kept.root));
    });
    warp.max_of_neighbors(exp_avg, kGroupThreads);
    warp.max_of_neighbors(root, kGroupThreads);
    warp.each([&](int thread) {
      const int group = first + thread / kGroupThreads;
      if (group >= end) {
        return;
      }
      const auto& kept = moments[thread];
      using L = ScalarLane<float>;
      const auto exp_avg_encoding =
          encoding_of<L>(bit_cast<float>(exp_avg[thread]), kLargestCode, scalars.units.exp_avg);
      const auto root_encoding =
          encoding_of<L>(bit_cast<float>(root[thread]), kRootCodes, scalars.units.root);
      if (thread % kGroupThreads == 0) {
        exp_avg_scales[group] = exp_avg_encoding.scale;
        root_scales[group] = root_encoding.scale;
      }
      const PerMoment<float> inverse{exp_avg_encoding.inverse, root_encoding.inverse};
      const int begin = groups.begin(group);
      for_each_part(
          group, thread, true,
          [&](const auto& draws, int i) {
            store_codes<Share>(
                i, encode_moments<Share>(kept, inverse, rounding_offset<Share>(i - begin, draws)));
          },
          [&](const auto& draws, int i, int k) {
            Moments<One> one{};
            at_element(k, [&](int known) {
              one = {{{kept.exp_avg.element[known]}}, {{kept.root.element[known]}}};
            });
            store_codes<One>(
                i, encode_moments<One>(one, inverse, rounding_offset<One>(i - begin, draws)));
          });
    });
  }

  const AdamChunk<kKind> elements;
  const QuantizedScalars scalars;
  const ChunkGroups groups;
  const int64_t first_group;  // the chunk's first group, counted in the tensor
  const uint32_t step;
  float* const exp_avg_scales;
  float* const root_scales;

 private:
  // Stores the weights of elements [i, i + L::width) and returns their moments.
  template <class L, class Random>
  TORCHOPT_HD Moments<L> update_weights(int i, const PerMoment<float>& scales,
                                        const Random* draws) const {
    using Scalar = ScalarLane<float>;
    const QuantizedFactors<L> factors{scalars};
    const PerMoment<float> decoding{Scalar::mul(scales.exp_avg, scalars.decoding.exp_avg),
                                    Scalar::mul(scales.root, scalars.decoding.root)};
    const ElementsAt<L> at = elements.at(L{}, i);
    const Moments<L> now = average_moments(at, factors, decoding);
    at.store_weight(updated_weights(at, factors, now), elements.mode, draws);
    if (elements.mode.write_back) {
      at.store_scaled_gradient(at.gradient(), elements.scalars.grad_factor);
    }
    return now;
  }
  template <class L>
  TORCHOPT_HD void store_codes(int i, const Moments<L>& codes) const {
    L::store_codes(static_cast<int8_t*>(elements.x[kExpAvg]) + i, codes.exp_avg);
    L::store_codes(static_cast<uint8_t*>(elements.x[kExpAvgSq]) + i, codes.root);
  }

  // Returns what is added to an array's codes: dither from `place` of a group on, or random bits.
  template <class L>
  TORCHOPT_HD auto rounding_offset(int place, const typename L::Random* random) const {
    return [this, place, random](Array array) {
      if (random != nullptr) {
        return random_offset<L>(*random, array);
      }
      typename L::reg all;
      unrolled<L::width>([&](int k) { all.element[k] = dither(array, step, place + k); });
      return all;
    };
  }

  // Visits a thread's part of a group: whole(draws, i) for elements [i, i + 8) if the group is full
  // and aligned, else single(draws, i, k) for the k-th of up to 8 elements. `draws` points to
  // random bits if `random` is set and the step rounds stochastically. Otherwise `draws` is null.
  template <class Whole, class Single>
  TORCHOPT_HD void for_each_part(int group, int thread, bool random, const Whole& whole,
                                 const Single& single) const {
    const int begin = groups.begin(group);
    const int size = groups.size(group);
    const int member = thread % kGroupThreads;
    const bool draws = random && elements.mode.rounds;
    uint64_t number = 0;
    RoundingStream stream{};
    if (draws) {
      number = static_cast<uint64_t>(global_element(elements.work, elements.begin + begin));
      stream = rounding_stream({elements.options.rounding_seed, step, elements.work.index}, number);
    }
    if (size == kQuantGroup &&
        are_all_aligned_at(elements.layout, elements.x, kThreadElements, begin)) {
      const int i = member * kThreadElements;
      if (draws) {
        const auto drawn = random_bits_of_group<Share>(stream, number, i);
        whole(&drawn, begin + i);
      } else {
        whole(static_cast<const typename Share::Random*>(nullptr), begin + i);
      }
      return;
    }
    for (int i = member, k = 0; i < size; i += kGroupThreads, ++k) {
      if (draws) {
        const auto drawn = random_bits_of_group<One>(stream, number, i);
        single(&drawn, begin + i, k);
      } else {
        single(static_cast<const typename One::Random*>(nullptr), begin + i, k);
      }
    }
  }
};

template <AdamKind kKind, class Cta>
TORCHOPT_HD inline void update_chunk(const Cta& cta, const QuantizedChunk<kKind>& chunk) {
  const int count = chunk.groups.count();
  cta.each_warp([&](int warp_index, const auto& warp) {
    for (int first = warp_index * kWarpGroups; first < count;
         first += cta.threads / kWarpThreads * kWarpGroups) {
      chunk.update(warp, first, count);
    }
  });
}

}  // namespace
}  // namespace torchopt_ext

// Pass B with 8-bit moments as the body of a CUDA kernel. Neighboring threads of a warp share a
// group of elements and keep its moments in registers until the group's scales are known.
#pragma once

#include "cuda/update.h"
#include "kernels/quantized_adam.h"

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

// Calls f(k) with k as a constant: an index of run time would move an array from
// registers to local memory.
template <class F>
TORCHOPT_HD inline void at_element(int k, const F& f) {
  unrolled<kThreadElements>([&](int constant) {
    if (constant == k) {
      f(constant);
    }
  });
}

// A chunk of a tensor with 8-bit moments.
template <Kind kKind>
struct QuantizedChunk {
  using A = AlgorithmOf<kKind>;
  using Share = VectorLane<float, kThreadElements>;
  using One = VectorLane<float, 1>;

  TORCHOPT_HD QuantizedChunk(const UpdateArgs& args, const Chunk& chunk)
      : elements(args, chunk),
        scalars(elements.scalars),
        groups(elements.work, elements.n),
        first_group(group_of(elements.work, elements.begin)),
        step(static_cast<uint32_t>(static_cast<int64_t>(step_of(elements.work)))) {
    for_each_moment<A>([&](auto moment) {
      scales[moment] = static_cast<float*>(elements.work.memory[scale_array(moment)]) + first_group;
    });
  }

  // Updates four groups from `first` on, or as many as there are below `end`.
  template <class Warp>
  TORCHOPT_HD void update(const Warp& warp, int first, int end) const {
    typename Warp::template PerThread<Moments<A, Share>> moments;
    typename Warp::template PerThread<uint32_t> largest[kMoments<A>];
    warp.each([&](int thread) {
      auto& kept = moments[thread];
      for_each_moment<A>([&](auto moment) { kept.of[moment] = Share::set1(0.0f); });
      const int group = first + thread / kGroupThreads;
      if (group < end) {
        PerMoment<A, float> decoding;
        for_each_moment<A>([&](auto moment) {
          decoding.of[moment] =
              ScalarLane<float>::mul(scales[moment][group], scalars.decoding.of[moment]);
        });
        const bool random = weight_may_round_randomly(elements.layout);
        for_each_part(
            group, thread, random,
            [&](const auto& draws, int i) { kept = update_weights<Share>(i, decoding, draws); },
            [&](const auto& draws, int i, int k) {
              const auto one = update_weights<One>(i, decoding, draws);
              at_element(k, [&](int constant) {
                for_each_moment<A>([&](auto moment) {
                  kept.of[moment].element[constant] = one.of[moment].element[0];
                });
              });
            });
      }
      for_each_moment<A>([&](auto moment) {
        largest[moment][thread] = bit_cast<uint32_t>(Share::largest(kept.of[moment]));
      });
    });
    for_each_moment<A>([&](auto moment) { warp.max_of_neighbors(largest[moment], kGroupThreads); });
    warp.each([&](int thread) {
      const int group = first + thread / kGroupThreads;
      if (group >= end) {
        return;
      }
      const auto& kept = moments[thread];
      PerMoment<A, float> inverse;
      for_each_moment<A>([&](auto moment) {
        const auto encoding = encoding_of<ScalarLane<float>>(
            bit_cast<float>(largest[moment][thread]), kCodes<A, moment>, scalars.units.of[moment]);
        inverse.of[moment] = encoding.inverse;
        if (thread % kGroupThreads == 0) {
          scales[moment][group] = encoding.scale;
        }
      });
      const int begin = groups.begin(group);
      for_each_part(
          group, thread, true,
          [&](const auto& draws, int i) { store_codes<Share>(i, i - begin, kept, inverse, draws); },
          [&](const auto& draws, int i, int k) {
            Moments<A, One> one{};
            at_element(k, [&](int constant) {
              for_each_moment<A>([&](auto moment) {
                one.of[moment].element[0] = kept.of[moment].element[constant];
              });
            });
            store_codes<One>(i, i - begin, one, inverse, draws);
          });
    });
  }

  const UpdateChunk<kKind> elements;
  const QuantizedScalars<A> scalars;
  const ChunkGroups groups;
  const int64_t first_group;  // the chunk's first group, counted in the tensor
  const uint32_t step;
  float* scales[kMoments<A>];  // of the chunk's groups

 private:
  // Stores the weights of elements [i, i + L::width) and returns their moments.
  template <class L, class Random>
  TORCHOPT_HD Moments<A, L> update_weights(int i, const PerMoment<A, float>& decoding,
                                           const Random* draws) const {
    const QuantizedStep<A, L> formula(scalars);
    const ElementsAt<L> at = elements.at(L{}, i);
    const Moments<A, L> now = formula.averaged(at, decoding);
    store_updated<A>(at, formula.weights(at, decoding, now), elements.mode, draws);
    if (elements.mode.write_back) {
      at.store_scaled_gradient(at.gradient(), elements.scalars.grad_factor);
    }
    return now;
  }
  // Encodes moments. `inverse` has the inverses of the scales. Codes are rounded by dither from
  // `place` of a group on, or by random bits.
  template <class L>
  TORCHOPT_HD void store_codes(int i, int place, const Moments<A, L>& moments,
                               const PerMoment<A, float>& inverse,
                               const typename L::Random* random) const {
    for_each_moment<A>([&](auto moment) {
      using Code = CodeOf<A, moment>;
      typename L::reg added;
      if (random != nullptr) {
        added = random_offset<A, moment, L>(*random);
      } else {
        unrolled<L::width>(
            [&](int k) { added.element[k] = dither(kIsRoot<A, moment>, step, place + k); });
      }
      L::store_codes(static_cast<Code*>(elements.x[state_array(moment)]) + i,
                     L::fma(moments.of[moment], L::set1(inverse.of[moment]), added));
    });
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

template <Kind kKind, class Cta>
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

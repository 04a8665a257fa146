// Tracking on CUDA (kernels/trace.h): pass B on a chunk, with what it saw of the chunk's tiles.
#pragma once

#include "cuda/adam_quantized.h"
#include "cuda/sum_traces.h"
#include "kernels/block_rule.h"
#include "kernels/digest.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// A tile's squares are summed by the block rule, and the sums of tiles are added in order, as on
// the CPU. A tile of kTileGroups groups has fewer elements where rows end in short groups.
inline constexpr int kTraceTile = 512;
inline constexpr int kMostTiles = 2 * kChunkElements / kTraceTile;

using TraceShared = ChunkTrace[kMostTiles];

// The kernels of tracking: each takes the chunks of its tensors and leaves the others'.
enum class TracedKind { kFloat32, kFloat64, kQuantized };
inline constexpr int kTracedKinds = 3;

namespace {

// Digest of a thread's lane of a tile: elements [begin, end), a row of lanes apart. Those of a
// segment have one factor for each array (lane_factor), by which the sum of their halves is
// multiplied: of at most 8 elements, so it is below 2**29.
template <class T>
TORCHOPT_HD inline uint64_t digest_lane(const AdamChunk<T>& elements, int begin, int end) {
  static_assert(kTraceTile / kBlockLanes == 8 && kBlockLanes / 4 % kDigestLanes == 0);
  const TensorWork& work = elements.work;
  uint64_t digest = 0;
  uint64_t first = 0;  // the number of the first element since the last multiplication
  int32_t halves[kWritten]{};
  const auto multiply = [&] {
    const DigestPlace place = digest_place(work.index, first);
    for_each_stored(work.layout, [&](Array array) {
      const auto size = static_cast<uint32_t>(element_size(work.layout, array));
      const int64_t factor = lane_factor(place, place.number % kDigestSegment * size / 4);
      digest += static_cast<uint64_t>(halves[array] * factor) * array_factor(array);
      halves[array] = 0;
    });
  };
  for (int i = begin; i < end; i += kBlockLanes) {
    const auto number = static_cast<uint64_t>(global_element(work, elements.begin + i));
    if constexpr (sizeof(T) == sizeof(double)) {
      digest += digest_element<T>(work.layout, elements.x, i, digest_place(work.index, number));
    } else {
      // A shard's runs may leave the lane within a segment.
      if (number / kDigestSegment != first / kDigestSegment ||
          number % kBlockLanes != first % kBlockLanes) {
        multiply();
        first = number;
      }
      for_each_stored(work.layout, [&](Array array) {
        const int64_t size = element_size(work.layout, array);
        const char* const at = static_cast<const char*>(elements.x[array]) + size * i;
        const auto in_segment = static_cast<uint32_t>(number % kDigestSegment);
        halves[array] += static_cast<int32_t>(weighted_element(at, size, in_segment));
      });
    }
  }
  multiply();
  return digest;
}

// What the threads of a warp see of a tile. By the block rule, thread t owns lanes 2t and 2t + 1.
template <class T, class Warp>
struct TileSums {
  using D = ScalarLane<double>;

  // Before a register's step, whose elements are of the thread's two lanes in turn, the first one
  // of lane `first`. Returns its weights.
  template <class L>
  TORCHOPT_HD typename L::reg before(const L& lane, const AdamChunk<T>& elements, int thread,
                                     int first, int i) {
    const Layout& layout = elements.work.layout;
    const typename L::reg g = load_as(lane, layout.grad, elements.x[kGrad], i);
    unrolled<L::width>([&](int k) {
      double& sum = grad[(first + k) % 2][thread];
      sum = D::add(sum, square(g.element[k]));
    });
    return load_weight(lane, layout, elements.x, i);
  }
  // After it.
  template <class L>
  TORCHOPT_HD void after(const L& lane, const AdamChunk<T>& elements, int thread, int first, int i,
                         const typename L::reg& before) {
    using One = typename L::One;
    const Layout& layout = elements.work.layout;
    const typename L::reg after = load_weight(lane, layout, elements.x, i);
    const typename L::reg exp_avg = load_exp_avg(lane, layout, elements.x, i);
    unrolled<L::width>([&](int k) {
      double& sum = change[(first + k) % 2][thread];
      sum = D::add(sum, square(One::sub(after.element[k], before.element[k])));
      lost[thread] += One::count_lost(before.element[k], after.element[k], exp_avg.element[k],
                                      elements.scalars.has_decay);
    });
  }
  // The result is thread 0's.
  TORCHOPT_HD ChunkTrace total(const Warp& warp) {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      unrolled<2>([&](int lane) {
        warp.fold(grad[lane], distance);
        warp.fold(change[lane], distance);
      });
      warp.fold(lost, distance);
      warp.fold(digest, distance);
    }
    return {D::add(grad[0][0], grad[1][0]), D::add(change[0][0], change[1][0]), lost[0], digest[0]};
  }

  typename Warp::template PerThread<double> grad[2]{};
  typename Warp::template PerThread<double> change[2]{};
  typename Warp::template PerThread<int64_t> lost{};
  typename Warp::template PerThread<uint64_t> digest{};
};

// A warp's step of elements [begin, end), a tile at most, with what it saw: of some rows of lanes
// at once, whose loads are under way together.
template <class T, class Warp>
TORCHOPT_HD inline ChunkTrace update_tile(const Warp& warp, const AdamChunk<T>& elements, int begin,
                                          int end) {
  constexpr int kRows = 8 / sizeof(T);  // more take more registers than there are
  using Rows = VectorLane<T, 2 * kRows, 2, kBlockLanes>;
  using Pair = VectorLane<T, 2, 2, 2, 1>;  // wherever it lies
  const TensorWork& work = elements.work;
  const StepOptions& options = elements.options;
  const bool aligned = are_registers_at(work.layout, elements.x, 2, begin);
  TileSums<T, Warp> sums;
  warp.each([&](int thread) {
    const auto step = [&](const auto& lane, int i) {
      const auto before = sums.before(lane, elements, thread, 0, i);
      elements.update(lane, work.layout, {.write_back = options.write_back_gradients},
                      rounds_randomly(options, work.layout), i);
      sums.after(lane, elements, thread, 0, i, before);
    };
    int i = begin + 2 * thread;
    for (int row = begin; aligned && row + kRows * kBlockLanes <= end; row += kRows * kBlockLanes) {
      step(Rows{}, i);
      i += kRows * kBlockLanes;
    }
    for (; i + 1 < end; i += kBlockLanes) {
      step(Pair{}, i);
    }
    if (i < end) {
      step(VectorLane<T, 1>{}, i);
    }
  });
  if ((options.track & kTrackDigest) != 0) {
    warp.each([&](int thread) {
      for (int lane = 0; lane < 2; ++lane) {
        sums.digest[thread] += digest_lane(elements, begin + 2 * thread + lane, end);
      }
    });
  }
  return sums.total(warp);
}

// The same of kTileGroups groups from `first` on, as far as there are so many.
template <class Warp>
TORCHOPT_HD inline ChunkTrace update_groups(const Warp& warp,
                                            const QuantizedChunk<AdamKind::kInt8>& chunk,
                                            int first) {
  using One = VectorLane<float, 1>;
  struct Weights {
    typename One::reg of[kTraceTile / kWarpThreads];
  };
  const AdamChunk<float>& elements = chunk.elements;
  const ChunkGroups& groups = chunk.groups;
  const int last = first + kTileGroups < groups.count() ? first + kTileGroups : groups.count();
  const int begin = groups.begin(first);
  const int end = groups.begin(last - 1) + groups.size(last - 1);
  TileSums<float, Warp> sums;
  typename Warp::template PerThread<Weights> before;
  const auto for_each_owned = [&](int thread, const auto& visit) {
    unrolled<kTraceTile / kWarpThreads>([&](int k) {
      const int lane = k % 2;
      const int i = begin + 2 * thread + lane + k / 2 * kBlockLanes;
      if (i < end) {
        visit(k, lane, i);
      }
    });
  };
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      before[thread].of[k] = sums.before(One{}, elements, thread, lane, i);
    });
  });
  for (int group = first; group < last; group += kWarpGroups) {
    chunk.update(warp, group, last);
  }
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      sums.after(One{}, elements, thread, lane, i, before[thread].of[k]);
    });
    const int digests =
        (elements.options.track & kTrackDigest) != 0 ? kTraceTile / kWarpThreads : 0;
    for (int k = 0; k < digests; ++k) {  // a loop: digests are long
      const int i = begin + 2 * thread + k % 2 + k / 2 * kBlockLanes;
      if (i >= end) {
        continue;
      }
      const int group = groups.of(i);
      const int in_group = i - groups.begin(group);
      const auto number = static_cast<uint64_t>(
          global_element(elements.work, elements.begin + groups.begin(group)));
      const DigestPlace place = digest_place(elements.work.index, number, in_group);
      sums.digest[thread] += digest_element<float>(elements.work.layout, elements.x, i, place);
      if (in_group == 0) {
        sums.digest[thread] +=
            digest_scales(elements.work.memory, chunk.first_group + group, place);
      }
    }
  });
  return sums.total(warp);
}

TORCHOPT_HD constexpr TracedKind traced_kind(AdamKind kind) {
  return kind == AdamKind::kFloat64 ? TracedKind::kFloat64
         : is_quantized(kind)       ? TracedKind::kQuantized
                                    : TracedKind::kFloat32;
}

// A block's chunk, of a tensor of this kind: a warp takes a tile, and the tiles are added in their
// order.
template <TracedKind kKind, class Cta>
TORCHOPT_HD inline void adam_traced_body(const Cta& cta, TraceShared& shared, const AdamArgs& args,
                                         const TraceArgs& traces) {
  using T = std::conditional_t<kKind == TracedKind::kFloat64, double, float>;
  const Chunk chunk = args.chunks[cta.block];
  if (args.steps[chunk.tensor].grad == nullptr ||
      traced_kind(args.tensors[chunk.tensor].kind) != kKind) {
    return;
  }
  const AdamChunk<T> elements(args, chunk);
  const auto for_each_tile = [&](int tiles, const auto& step) {
    cta.each_warp([&](int warp_index, const auto& warp) {
      for (int tile = warp_index; tile < tiles; tile += cta.threads / kWarpThreads) {
        const ChunkTrace seen = step(warp, tile);
        warp.leader([&] { shared[tile] = seen; });
      }
    });
    return tiles;
  };
  int tiles = 0;
  if constexpr (kKind == TracedKind::kQuantized) {
    const QuantizedChunk<AdamKind::kInt8> quantized(elements, elements.work.layout);
    tiles = for_each_tile((quantized.groups.count() + kTileGroups - 1) / kTileGroups,
                          [&](const auto& warp, int tile) {
                            return update_groups(warp, quantized, tile * kTileGroups);
                          });
  } else {
    tiles =
        for_each_tile((elements.n + kTraceTile - 1) / kTraceTile, [&](const auto& warp, int tile) {
          const int begin = tile * kTraceTile;
          const int left = elements.n - begin;
          const int n = left < kTraceTile ? left : kTraceTile;
          return update_tile(warp, elements, begin, begin + n);
        });
  }
  cta.each([&](int thread) {
    if (thread == 0) {
      ChunkTrace sum{};
      for (int tile = 0; tile < tiles; ++tile) {
        add_trace(sum, shared[tile]);
      }
      traces.chunks[cta.block] = tracked(sum, args.options.track);
    }
  });
}

}  // namespace

// Instead of launch_adam, on the CPU's chunks, whose sums tracking adds up: for tensors of one
// kind.
void launch_adam_traced(TracedKind kind, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, CUstream_st* stream);

}  // namespace torchopt_ext

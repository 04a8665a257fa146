// Tracking on CUDA (kernels/trace.h): pass B on a chunk, with what it saw of the chunk's tiles.
#pragma once

#include "cuda/adam_quantized.h"
#include "kernels/block_rule.h"
#include "kernels/digest.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// A tile's squares are summed by the block rule, and the sums of tiles are added in order, as on
// the CPU. A tile of kTileGroups groups has fewer elements where rows end in short groups.
inline constexpr int kTraceTile = 512;
inline constexpr int kMostTiles = 2 * kChunkElements / kTraceTile;

// Where a tracked step reports, in device memory.
struct TraceArgs {
  ChunkTrace* chunks;  // of each chunk
  double* norms;       // of each tensor, as in Traces
  int64_t* counts;
};

using TraceShared = ChunkTrace[kMostTiles];

// The kernels of tracking: each takes the chunks of its tensors and leaves the others'.
enum class TracedKind { kFloat32, kFloat64, kQuantized };
inline constexpr int kTracedKinds = 3;

namespace {

// What the threads of a warp see of a tile. By the block rule, thread t owns lanes 2t and 2t + 1.
template <class T, class Warp>
struct TileSums {
  using L = ScalarLane<T>;
  using D = ScalarLane<double>;

  // Before an element's step. Returns its weight.
  TORCHOPT_HD T before(const AdamChunk<T>& elements, int thread, int lane, int i) {
    const Layout& layout = elements.work.layout;
    grad[lane][thread] =
        D::add(grad[lane][thread], square(load_as(L{}, layout.grad, elements.x[kGrad], i)));
    return load_weight(L{}, layout, elements.x, i);
  }
  // After it.
  TORCHOPT_HD void after(const AdamChunk<T>& elements, int thread, int lane, int i, T before) {
    const Layout& layout = elements.work.layout;
    const T after = load_weight(L{}, layout, elements.x, i);
    change[lane][thread] = D::add(change[lane][thread], square(L::sub(after, before)));
    lost[thread] += L::count_lost(before, after, load_exp_avg(L{}, layout, elements.x, i),
                                  elements.scalars.has_decay);
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

// A warp's step of elements [begin, end), a tile at most, with what it saw.
template <class T, class Warp>
TORCHOPT_HD inline ChunkTrace update_tile(const Warp& warp, const AdamChunk<T>& elements, int begin,
                                          int end) {
  const StepOptions& options = elements.options;
  TileSums<T, Warp> sums;
  warp.each([&](int thread) {
    unrolled<2>([&](int lane) {
      for (int i = begin + 2 * thread + lane; i < end; i += kBlockLanes) {
        const T before = sums.before(elements, thread, lane, i);
        const Layout& layout = elements.work.layout;
        elements.update(VectorLane<T, 1>{}, layout, {.write_back = options.write_back_gradients},
                        rounds_randomly(options, layout), i);
        sums.after(elements, thread, lane, i, before);
        if ((options.track & kTrackDigest) != 0) {
          const auto number =
              static_cast<uint64_t>(global_element(elements.work, elements.begin + i));
          const DigestPlace place = digest_place(elements.work.index, number);
          sums.digest[thread] += digest_element<T>(elements.work.layout, elements.x, i, place);
        }
      }
    });
  });
  return sums.total(warp);
}

// The same of kTileGroups groups from `first` on, as far as there are so many.
template <class Warp>
TORCHOPT_HD inline ChunkTrace update_groups(const Warp& warp, const QuantizedChunk<true>& chunk,
                                            int first) {
  struct Weights {
    float of[kTraceTile / kWarpThreads];
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
      before[thread].of[k] = sums.before(elements, thread, lane, i);
    });
  });
  for (int group = first; group < last; group += kWarpGroups) {
    chunk.update(warp, group, last);
  }
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      sums.after(elements, thread, lane, i, before[thread].of[k]);
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
    const QuantizedChunk<true> quantized(elements, elements.work.layout);
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

// What was seen of tensor i, from its chunks, which lie together in the table.
TORCHOPT_HD inline void sum_traces_body(int64_t i, int64_t tensor_count, int64_t chunk_count,
                                        const AdamArgs& args, const TraceArgs& traces) {
  if (i >= tensor_count || args.control->skip != 0.0) {
    return;
  }
  int64_t c = 0;
  for (int64_t end = chunk_count; c < end;) {
    const int64_t middle = c + (end - c) / 2;
    if (args.chunks[middle].tensor < i) {
      c = middle + 1;
    } else {
      end = middle;
    }
  }
  ChunkTrace sum{};
  for (; c < chunk_count && args.chunks[c].tensor == i; ++c) {
    add_trace(sum, traces.chunks[c]);
  }
  finish_trace(sum, *args.control, args.steps[i].grad != nullptr, traces.norms + 2 * i,
               traces.counts + 2 * i);
}

}  // namespace

// Instead of launch_adam, on the CPU's chunks, whose sums tracking adds up: for tensors of one
// kind.
void launch_adam_traced(TracedKind kind, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, CUstream_st* stream);
void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, CUstream_st* stream);

}  // namespace torchopt_ext

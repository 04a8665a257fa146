// Tracking on CUDA (kernels/trace.h): pass B on a chunk, which also records the chunk's trace.
#pragma once

#include "cuda/adam_quantized.h"
#include "cuda/digest_tile.h"
#include "cuda/sum_traces.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// A tile's squares are summed by the block rule, and the sums of tiles are added in order, as on
// the CPU. A tile of kTileGroups groups has fewer than kTileElements elements if rows end in
// short groups, but more than half: rows with 8-bit moments have at least kQuantGroup
// (entry_checks.cpp).
inline constexpr int kMostTiles = 2 * kChunkElements / kTileElements;

struct TileNorms {
  double sumsq[2];  // of the gradient, of the update
};
struct WarpCounts {
  int64_t lost;
  uint64_t digest;
};
struct TraceShared {
  TileNorms tiles[kMostTiles];
  WarpCounts warps[kAdamThreads / kWarpThreads];
  uint16_t half_factors[kDigestSegment];  // half_factor() of each word's upper half
};

namespace {

// Sums and counts over a warp's tiles. By the block rule, thread t owns lanes 2t and 2t + 1.
template <class T, class Warp>
struct WarpTrace {
  using D = ScalarLane<double>;
  template <class Value>
  using PerThread = typename Warp::template PerThread<Value>;

  // Called before a register's step: adds the squares of its gradient and returns its weights. The
  // elements alternate between the thread's two lanes, from lane `first` on.
  template <class L>
  TORCHOPT_HD typename L::reg before(const L& lane, const AdamChunk<T>& elements,
                                     const Layout& layout, int thread, int first, int i) {
    const typename L::reg g = load_as(lane, layout.grad, elements.x[kGrad], i);
    unrolled<L::width>([&](int k) {
      double& sum = grad[(first + k) % 2][thread];
      sum = D::add(sum, square(g.element[k]));
    });
    return load_weight(lane, layout, elements.x, i);
  }
  // Called after the register's step: adds the squares of the changes and counts lost updates.
  template <class L>
  TORCHOPT_HD void after(const L& lane, const AdamChunk<T>& elements, const Layout& layout,
                         int thread, int first, int i, const typename L::reg& before) {
    using SingleLane = typename L::SingleLane;
    const typename L::reg after = load_weight(lane, layout, elements.x, i);
    const typename L::reg exp_avg = load_exp_avg(lane, layout, elements.x, i);
    unrolled<L::width>([&](int k) {
      double& sum = change[(first + k) % 2][thread];
      sum = D::add(sum, square(SingleLane::sub(after.element[k], before.element[k])));
      lost[thread] += SingleLane::count_lost(before.element[k], after.element[k],
                                             exp_avg.element[k], elements.scalars.has_decay);
    });
  }
  // Writes a tile's sums of squares, added in the block rule's order. After two folds each thread
  // holds one of four sums: the gradient's if thread & 16 is 0, else the update's; of lane 0 if
  // thread & 8 is 0, else of lane 1. The last fold adds the two lanes.
  TORCHOPT_HD void finish_tile(const Warp& warp, TileNorms& norms) {
    unrolled<2>([&](int lane) { warp.fold_pair(grad[lane], change[lane], 16); });
    warp.fold_pair(grad[0], grad[1], 8);
    warp.fold(grad[0], 4);
    warp.fold(grad[0], 2);
    warp.fold(grad[0], 1);
    warp.fold(grad[0], 8);
    warp.each([&](int thread) {
      if (thread % 16 == 0) {
        norms.sumsq[thread / 16] = grad[0][thread];
      }
    });
    unrolled<2>([&](int lane) { grad[lane] = change[lane] = {}; });
  }
  // Writes the counts of all tiles.
  TORCHOPT_HD void finish(const Warp& warp, WarpCounts& counts) {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      warp.fold(lost, distance);
      warp.fold(digest, distance);
    }
    warp.leader([&] { counts = {lost[0], digest[0]}; });
  }

  PerThread<double> grad[2]{};
  PerThread<double> change[2]{};
  PerThread<int> lost{};
  PerThread<uint64_t> digest{};
};

// A chunk of a tensor without 8-bit moments.
template <AdamKind kKind>
struct PlainChunk {
  using T = std::conditional_t<kKind == AdamKind::kFloat64, double, float>;
  const AdamChunk<T>& elements;
  const Layout& layout;
};
template <AdamKind kKind>
TORCHOPT_HD inline int tiles_of(const PlainChunk<kKind>& chunk) {
  return (chunk.elements.n + kTileElements - 1) / kTileElements;
}
template <AdamKind kKind>
TORCHOPT_HD inline int tiles_of(const QuantizedChunk<kKind>& chunk) {
  return (chunk.groups.count() + kTileGroups - 1) / kTileGroups;
}

// Updates a tile by a warp, several rows of lanes at once, so that their loads overlap.
template <AdamKind kKind, class T, class Warp>
TORCHOPT_HD inline void update_tile(const Warp& warp, WarpTrace<T, Warp>& trace,
                                    const PlainChunk<kKind>& chunk,
                                    const SharedHalfFactors& factors, int tile) {
  constexpr int kRows = register_width(kKind) / 2;
  using Rows = VectorLane<T, 2 * kRows, 2, kBlockLanes>;
  const AdamChunk<T>& elements = chunk.elements;
  const Layout& layout = chunk.layout;
  const int begin = tile * kTileElements;
  const int end = begin + kTileElements < elements.n ? begin + kTileElements : elements.n;
  const StepOptions& options = elements.options;
  const bool aligned = are_all_aligned_at(layout, elements.x, 2, begin);
  warp.each([&](int thread) {
    const auto step = [&](const auto& lane, int i) {
      const auto before = trace.before(lane, elements, layout, thread, 0, i);
      elements.update(lane, layout, {.write_back = writes_back<kKind>(options)},
                      rounds_randomly<kKind>(options, layout), i);
      trace.after(lane, elements, layout, thread, 0, i, before);
    };
    int i = begin + 2 * thread;
    for (int row = begin; aligned && row + kRows * kBlockLanes <= end; row += kRows * kBlockLanes) {
      step(Rows{}, i);
      i += kRows * kBlockLanes;
    }
    for (; i + 1 < end; i += kBlockLanes) {
      step(UnalignedPairLane<T>{}, i);
    }
    if (i < end) {
      step(VectorLane<T, 1>{}, i);
    }
  });
  if ((options.track & kTrackDigest) != 0) {
    digest_tile(warp, trace.digest, elements, layout, factors, begin, end, [&](int i) {
      const int64_t number = global_element(elements.work, elements.begin + i);
      return digest_place(elements.work.index, static_cast<uint64_t>(number));
    });
  }
}

// Updates a tile of kTileGroups groups, or as many as are left.
static_assert(kTileGroups <= kWarpThreads);
template <AdamKind kKind, class Warp>
TORCHOPT_HD inline void update_tile(const Warp& warp, WarpTrace<float, Warp>& trace,
                                    const QuantizedChunk<kKind>& chunk,
                                    const SharedHalfFactors& factors, int tile) {
  using SingleLane = VectorLane<float, 1>;
  struct Weights {
    typename SingleLane::reg of[kTileElements / kWarpThreads];
  };
  const AdamChunk<float>& elements = chunk.elements;
  const ChunkGroups& groups = chunk.groups;
  const int first = tile * kTileGroups;
  const int last = first + kTileGroups < groups.count() ? first + kTileGroups : groups.count();
  const int begin = groups.begin(first);
  const int end = groups.begin(last - 1) + groups.size(last - 1);
  typename Warp::template PerThread<Weights> before;
  const auto for_each_owned = [&](int thread, const auto& visit) {
    unrolled<kTileElements / kWarpThreads>([&](int k) {
      const int lane = k % 2;
      const int i = begin + 2 * thread + lane + k / 2 * kBlockLanes;
      if (i < end) {
        visit(k, lane, i);
      }
    });
  };
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      before[thread].of[k] = trace.before(SingleLane{}, elements, chunk.layout, thread, lane, i);
    });
  });
  for (int group = first; group < last; group += kWarpGroups) {
    chunk.update(warp, group, last);
  }
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      trace.after(SingleLane{}, elements, chunk.layout, thread, lane, i, before[thread].of[k]);
    });
  });
  if ((elements.options.track & kTrackDigest) == 0) {
    return;
  }
  const auto place_of = [&](int group, int in_group) {
    const int64_t number = global_element(elements.work, elements.begin + groups.begin(group));
    return digest_place(elements.work.index, static_cast<uint64_t>(number), in_group);
  };
  warp.each([&](int thread) {
    const int group = first + thread;
    if (group < last) {
      trace.digest[thread] +=
          digest_scales(elements.work.memory, chunk.first_group + group, place_of(group, 0));
    }
  });
  digest_tile(warp, trace.digest, elements, chunk.layout, factors, begin, end, [&](int i) {
    const int group = groups.of(i);
    return place_of(group, i - groups.begin(group));
  });
}

// Updates a block's chunk if its tensor is of this kind. Each warp takes a tile at a time, and one
// thread adds the tiles' sums in order.
template <AdamKind kKind, class Cta>
TORCHOPT_HD inline void adam_traced_body(const Cta& cta, TraceShared& shared, const AdamArgs& args,
                                         const TraceArgs& traces) {
  using T = std::conditional_t<kKind == AdamKind::kFloat64, double, float>;
  const Chunk chunk = args.chunks[cta.block];
  if (args.steps[chunk.tensor].grad == nullptr || args.tensors[chunk.tensor].kind != kKind) {
    return;
  }
  const AdamChunk<T> elements(args, chunk);
  const Layout layout = known_layout<kKind>(elements.work.layout);
  cta.each([&](int thread) {
    for (int k = thread; k < static_cast<int>(kDigestSegment); k += cta.threads) {
      const int factor = half_factor(2 * static_cast<uint32_t>(k) + 1);
      shared.half_factors[k] = static_cast<uint16_t>(factor);
    }
  });
  using ChunkOfKind =
      std::conditional_t<is_quantized(kKind), QuantizedChunk<kKind>, PlainChunk<kKind>>;
  const ChunkOfKind of_kind{elements, layout};
  const int tiles = tiles_of(of_kind);
  const int warps = cta.threads / kWarpThreads;
  cta.each_warp([&](int warp_index, const auto& warp) __attribute__((always_inline)) {
    WarpTrace<T, std::remove_cvref_t<decltype(warp)>> trace;
    for (int tile = warp_index; tile < tiles; tile += warps) {
      update_tile(warp, trace, of_kind, SharedHalfFactors{shared.half_factors}, tile);
      trace.finish_tile(warp, shared.tiles[tile]);
    }
    trace.finish(warp, shared.warps[warp_index]);
  });
  cta.each([&](int thread) {
    if (thread == 0) {
      ChunkTrace sum{};
      for (int tile = 0; tile < tiles; ++tile) {
        const double(&sumsq)[2] = shared.tiles[tile].sumsq;
        add_trace(sum, {sumsq[0], sumsq[1], 0, 0});
      }
      for (int warp = 0; warp < warps; ++warp) {
        add_trace(sum, {0.0, 0.0, shared.warps[warp].lost, shared.warps[warp].digest});
      }
      traces.chunks[cta.block] = tracked(sum, args.options.track);
    }
  });
}

}  // namespace

// Replaces launch_adam in a tracked step, for tensors of one kind. It runs on the CPU's chunks,
// because tracking adds up sums of chunks.
void launch_adam_traced(AdamKind kind, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, CUstream_st* stream);

}  // namespace torchopt_ext

// Tracking on CUDA (kernels/trace.h): pass B on a chunk, which also records the chunk's trace, and
// the report of each tensor, made from the traces of its chunks.
#pragma once

#include "cuda/pass_b.h"
#include "kernels/block_rule.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// A tile's squares are summed by the block rule, and the sums of tiles are added in order, as on
// the CPU. A tile of kTileGroups groups has fewer than kTileElements elements if rows end in
// short groups, but more than half: rows with 8-bit moments have at least kQuantGroup
// (entry_checks.cpp).
inline constexpr int kMostTiles = 2 * kChunkElements / kTileElements;

// Pointers are to device memory.
struct TraceArgs {
  const int64_t* first_chunks;  // of each tensor, then the number of chunks
  ChunkTrace* chunks;           // the output of each chunk
  double* norms;                // the outputs of each tensor, as in Traces
  int64_t* lost;
};

namespace {

// Two elements at any address.
template <class T>
using TwoElementsAnywhere = VectorLane<T, 2, 2, 2, 1>;

// Sums and counts over a warp's tiles. By the block rule, thread t owns lanes 2t and 2t + 1.
template <Kind kKind, class Warp>
struct WarpTrace {
  using D = ScalarLane<double>;
  template <class Value>
  using PerThread = typename Warp::template PerThread<Value>;

  // Called before a register's step: adds the squares of its gradient and returns its weights. The
  // elements alternate between the thread's two lanes, from lane `first` on.
  template <class L>
  TORCHOPT_HD typename L::reg before(const L& lane, const UpdateChunk<kKind>& elements, int thread,
                                     int first, int i) {
    const ElementsAt<L> at = elements.at(lane, i);
    const typename L::reg g = at.gradient();
    unrolled<L::width>([&](int k) {
      double& sum = grad[(first + k) % 2][thread];
      sum = D::add(sum, square(g.element[k]));
    });
    return at.weight();
  }
  // Called after the register's step: adds the squares of the changes and counts lost updates.
  template <class L>
  TORCHOPT_HD void after(const L& lane, const UpdateChunk<kKind>& elements, int thread, int first,
                         int i, const typename L::reg& before) {
    using SingleLane = typename L::SingleLane;
    const typename L::reg after = elements.at(lane, i).weight();
    const typename L::reg mover = elements.at(lane, i).mover();
    unrolled<L::width>([&](int k) {
      double& sum = change[(first + k) % 2][thread];
      sum = D::add(sum, square(SingleLane::sub(after.element[k], before.element[k])));
      lost[thread] += SingleLane::count_lost(before.element[k], after.element[k], mover.element[k],
                                             elements.scalars.has_decay);
    });
  }
  // Writes a tile's sums of squares, added in the block rule's order. After two folds each thread
  // holds one of four sums: the gradient's if thread & 16 is 0, else the update's; of lane 0 if
  // thread & 8 is 0, else of lane 1. The last fold adds the two lanes.
  TORCHOPT_HD void finish_tile(const Warp& warp, double (&sumsq)[2]) {
    unrolled<2>([&](int lane) { warp.fold_pair(grad[lane], change[lane], 16); });
    warp.fold_pair(grad[0], grad[1], 8);
    warp.fold(grad[0], 4);
    warp.fold(grad[0], 2);
    warp.fold(grad[0], 1);
    warp.fold(grad[0], 8);
    warp.each([&](int thread) {
      if (thread % 16 == 0) {
        sumsq[thread / 16] = grad[0][thread];
      }
    });
    unrolled<2>([&](int lane) { grad[lane] = change[lane] = {}; });
  }
  // Writes the count of all tiles.
  TORCHOPT_HD void finish(const Warp& warp, int64_t& count) {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      warp.fold(lost, distance);
    }
    warp.leader([&] { count = lost[0]; });
  }

  PerThread<double> grad[2]{};
  PerThread<double> change[2]{};
  PerThread<int> lost{};
};

template <Kind kKind>
TORCHOPT_HD inline int tiles_of(const UpdateChunk<kKind>& chunk) {
  return (chunk.n + kTileElements - 1) / kTileElements;
}
template <Kind kKind>
TORCHOPT_HD inline int tiles_of(const QuantizedChunk<kKind>& chunk) {
  return (chunk.groups.count() + kTileGroups - 1) / kTileGroups;
}

// Updates a tile by a warp, two rows of lanes at once, so that their loads overlap: four rows would
// not fit in the registers of three blocks.
template <Kind kKind, class Warp>
TORCHOPT_HD inline void update_tile(const Warp& warp, WarpTrace<kKind, Warp>& trace,
                                    const UpdateChunk<kKind>& chunk, int tile) {
  using T = ComputeType<kKind>;
  constexpr int kRows = kTraits<kKind>.width > 2 ? 2 : 1;
  using Rows = VectorLane<T, 2 * kRows, 2, kBlockLanes>;
  const int begin = tile * kTileElements;
  const int end = begin + kTileElements < chunk.n ? begin + kTileElements : chunk.n;
  const bool aligned = are_all_aligned_at(chunk.layout, chunk.x, 2, begin);
  warp.each([&](int thread) {
    const auto step = [&](const auto& lane, int i) {
      const auto before = trace.before(lane, chunk, thread, 0, i);
      chunk.update(lane, i);
      trace.after(lane, chunk, thread, 0, i, before);
    };
    int i = begin + 2 * thread;
    for (int row = begin; aligned && row + kRows * kBlockLanes <= end; row += kRows * kBlockLanes) {
      step(Rows{}, i);
      i += kRows * kBlockLanes;
    }
    for (; i + 1 < end; i += kBlockLanes) {
      step(TwoElementsAnywhere<T>{}, i);
    }
    if (i < end) {
      step(VectorLane<T, 1>{}, i);
    }
  });
}

// Updates a tile of kTileGroups groups, or as many as are left.
static_assert(kTileGroups <= kWarpThreads);
template <Kind kKind, class Warp>
TORCHOPT_HD inline void update_tile(const Warp& warp, WarpTrace<kKind, Warp>& trace,
                                    const QuantizedChunk<kKind>& chunk, int tile) {
  using SingleLane = VectorLane<float, 1>;
  struct Weights {
    typename SingleLane::reg of[kTileElements / kWarpThreads];
  };
  const UpdateChunk<kKind>& elements = chunk.elements;
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
      before[thread].of[k] = trace.before(SingleLane{}, elements, thread, lane, i);
    });
  });
  for (int group = first; group < last; group += kWarpGroups) {
    chunk.update(warp, group, last);
  }
  warp.each([&](int thread) {
    for_each_owned(thread, [&](int k, int lane, int i) {
      trace.after(SingleLane{}, elements, thread, lane, i, before[thread].of[k]);
    });
  });
}

// Updates a block's chunk if its tensor is of this kind. Replaces UpdateKernel in a tracked step.
// It runs on the CPU's chunks, because tracking adds up sums of chunks. Each warp takes a tile at a
// time, and one thread adds the tiles' sums in order.
//
// Blocks on a multiprocessor: on an H100 four blocks instead of three took 6 % less time with bf16
// moments and 8 % more with fp32 moments. On sm_100 the registers do not suffice for four blocks.
// With 8-bit remainders two blocks took 40 % less than one.
// A number for the kind: nvcc cannot name values of an enumeration without enumerators.
template <int kNumber>
struct TracedKernel : KernelOf<kUpdateThreads, kTraits<Kind{kNumber}>.traced_blocks> {
  static constexpr Kind kKind{kNumber};
  struct Shared {
    double sumsq[kMostTiles][2];                  // of each tile's gradient and update
    int64_t lost[kUpdateThreads / kWarpThreads];  // by each warp
  };

  UpdateArgs args;
  TraceArgs traces;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta, Shared& shared) const {
    const Chunk chunk = args.chunks[cta.block];
    if (args.steps[chunk.tensor].grad == nullptr || args.tensors[chunk.tensor].kind != kKind) {
      return;
    }
    const ChunkOf<kKind> of_kind(args, chunk);
    cta.each([](int) {});  // a barrier: nvcc spills if it may mix the lines above and below
    const int tiles = tiles_of(of_kind);
    const int warps = cta.threads / kWarpThreads;
    cta.each_warp([&](int warp_index, const auto& warp) __attribute__((always_inline)) {
      WarpTrace<kKind, std::remove_cvref_t<decltype(warp)>> trace;
      for (int tile = warp_index; tile < tiles; tile += warps) {
        update_tile(warp, trace, of_kind, tile);
        trace.finish_tile(warp, shared.sumsq[tile]);
      }
      trace.finish(warp, shared.lost[warp_index]);
    });
    cta.each([&](int thread) {
      if (thread == 0) {
        ChunkTrace sum{};
        for (int tile = 0; tile < tiles; ++tile) {
          add_trace(sum, {shared.sumsq[tile][0], shared.sumsq[tile][1], 0});
        }
        for (int warp = 0; warp < warps; ++warp) {
          sum.lost += shared.lost[warp];
        }
        traces.chunks[cta.block] = tracked(sum, args.options.track);
      }
    });
  }
};

}  // namespace

// Makes the report of a block's tensor from the tensor's chunks, which are adjacent in the table. A
// warp reads the chunks' traces, and one thread adds them in order. Must run last.
struct SumTracesKernel : KernelOf<kWarpThreads> {
  using Shared = ChunkTrace[kWarpThreads];

  UpdateArgs args;
  TraceArgs traces;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta, Shared& shared) const {
    if (args.control->skip != 0.0) {
      return;
    }
    cta.each_warp([&](int, const auto& warp) { report(warp, shared, cta.block); });
  }

 private:
  template <class Warp>
  TORCHOPT_HD void report(const Warp& warp, Shared& shared, int64_t tensor) const {
    const int64_t last = traces.first_chunks[tensor + 1];
    ChunkTrace sum{};
    for (int64_t begin = traces.first_chunks[tensor]; begin < last; begin += kWarpThreads) {
      const auto n = static_cast<int>(last - begin < kWarpThreads ? last - begin : kWarpThreads);
      warp.each([&](int thread) {
        if (thread < n) {
          shared[thread] = traces.chunks[begin + thread];
        }
      });
      warp.leader([&] {
        for (int k = 0; k < n; ++k) {
          add_trace(sum, shared[k]);
        }
      });
    }
    warp.leader([&] {
      finish_trace(sum, *args.control, args.steps[tensor].grad != nullptr,
                   traces.norms + 2 * tensor, traces.lost[tensor]);
    });
  }
};

void launch_traced(Kind kind, const UpdateArgs& args, const TraceArgs& traces, int64_t chunk_count,
                   CUstream_st* stream);

}  // namespace torchopt_ext

// Tracking on CUDA (kernels/trace.h): pass B on a chunk, with what it saw of the chunk's tiles.
#pragma once

#include "cuda/adam.h"
#include "kernels/block_rule.h"
#include "kernels/digest.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// Elements that a ChunkTrace sums by the block rule before it adds the sums up: the CPU's tiles.
inline constexpr int kTraceTile = 512;

// Where a tracked step reports, in device memory.
struct TraceArgs {
  ChunkTrace* chunks;  // of each chunk
  double* norms;       // of each tensor, as in Traces
  int64_t* counts;
};

struct TraceShared {
  ChunkTrace tile[kChunkElements / kTraceTile];
};

namespace {

// A warp's step of elements [begin, end), a tile at most, with what it saw. By the block rule,
// thread t owns lanes 2t and 2t + 1. The result is thread 0's.
template <class T, class Warp>
TORCHOPT_HD inline ChunkTrace update_tile(const Warp& warp, const AdamChunk<T>& elements, int begin,
                                          int end) {
  using L = ScalarLane<T>;
  using D = ScalarLane<double>;
  const Layout& layout = elements.work.layout;
  typename Warp::template PerThread<double> grad[2];
  typename Warp::template PerThread<double> change[2];
  typename Warp::template PerThread<int64_t> lost;
  typename Warp::template PerThread<uint64_t> digest;
  warp.each([&](int thread) {
    lost[thread] = 0;
    digest[thread] = 0;
    unrolled<2>([&](int lane) {
      double grads = 0.0;
      double changes = 0.0;
      for (int i = begin + 2 * thread + lane; i < end; i += kBlockLanes) {
        grads = D::add(grads, square(load_as(L{}, layout.grad, elements.x[kGrad], i)));
        const T before = load_weight(L{}, layout, elements.x, i);
        elements.update_any(VectorLane<T, 1>{}, layout, i);
        const T after = load_weight(L{}, layout, elements.x, i);
        changes = D::add(changes, square(L::sub(after, before)));
        lost[thread] +=
            L::count_lost(before, after, load_as(L{}, layout.state, elements.x[kExpAvg], i),
                          elements.scalars.has_decay);
        const auto number =
            static_cast<uint64_t>(global_element(elements.work, elements.begin + i));
        const uint32_t factor = place_factors<ScalarWords>(digest_base(elements.work.index, number),
                                                           static_cast<uint32_t>(number));
        digest[thread] += digest_element<T>(layout, elements.x, i, factor);
      }
      grad[lane][thread] = grads;
      change[lane][thread] = changes;
    });
  });
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

// A block's chunk, of a tensor that is computed in T: a warp takes a tile, and the tiles are added
// in their order.
template <class T, class Cta>
TORCHOPT_HD inline void adam_traced_body(const Cta& cta, TraceShared& shared, const AdamArgs& args,
                                         const TraceArgs& traces) {
  const Chunk chunk = args.chunks[cta.block];
  const bool is_double = args.tensors[chunk.tensor].kind == AdamKind::kFloat64;
  if (args.steps[chunk.tensor].grad == nullptr || is_double != (sizeof(T) == sizeof(double))) {
    return;
  }
  const AdamChunk<T> elements(args, chunk);
  const int tiles = (elements.n + kTraceTile - 1) / kTraceTile;
  cta.each_warp([&](int warp_index, const auto& warp) {
    for (int tile = warp_index; tile < tiles; tile += cta.threads / kWarpThreads) {
      const int begin = tile * kTraceTile;
      const int end = elements.n - begin < kTraceTile ? elements.n : begin + kTraceTile;
      const ChunkTrace seen = update_tile(warp, elements, begin, end);
      warp.leader([&] { shared.tile[tile] = seen; });
    }
  });
  cta.each([&](int thread) {
    if (thread == 0) {
      ChunkTrace sum{};
      for (int tile = 0; tile < tiles; ++tile) {
        add_trace(sum, shared.tile[tile]);
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

// Instead of launch_adam, on the CPU's chunks, whose sums tracking adds up: for tensors of fp64, or
// for all others.
void launch_adam_traced(bool is_double, const AdamArgs& args, const TraceArgs& traces,
                        int64_t chunk_count, CUstream_st* stream);
void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, CUstream_st* stream);

}  // namespace torchopt_ext

// Pass B as the bodies of CUDA kernels, templates over the block of threads (cta.h): first the
// step counts and scalars of each tensor, then its elements, then what was seen of it. Free of
// torch.
#pragma once

#include "cuda/adam_group.h"
#include "cuda/cta.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// A param group's arguments; a learning rate on the device replaces the number.
struct GroupArgs {
  AdamHyper hyper;
  const void* lr;
  DType lr_dtype;
};

// All in device memory.
struct AdamArgs {
  const TensorWork* tensors;
  const Chunk* chunks;
  const GroupArgs* groups;
  const Control* control;
  TensorScalars* scalars;  // of each tensor
  int64_t tensor_count;
  int64_t chunk_count;
  StepOptions options;
  ChunkTrace* traces;  // of each chunk; null if the options do not ask for it
  double* norms;       // of each tensor, as in Traces
  int64_t* counts;
};

// Elements that a ChunkTrace sums by the block rule before it adds the sums up: the CPU's tiles.
inline constexpr int64_t kTraceTile = 512;

namespace {

TORCHOPT_HD inline double learning_rate(const GroupArgs& group) {
  if (group.lr == nullptr) {
    return group.hyper.lr;
  }
  return group.lr_dtype == DType::kFloat64
             ? *static_cast<const double*>(group.lr)
             : static_cast<double>(*static_cast<const float*>(group.lr));
}

// Counts the step of tensor i if it takes part, and computes its scalars. A kernel of its own,
// before the elements', whose blocks all read them.
TORCHOPT_HD inline void prepare_body(int64_t i, const AdamArgs& args) {
  if (i >= args.tensor_count || args.control->skip != 0.0 ||
      args.tensors[i].memory[kGrad] == nullptr) {
    return;
  }
  const TensorWork& work = args.tensors[i];
  const GroupArgs& group = args.groups[work.group];
  step_of(work) = ScalarLane<float>::add(step_of(work), 1.0f);
  AdamHyper hyper = group.hyper;
  hyper.lr = ScalarLane<double>::mul(learning_rate(group), args.control->lr_factor);
  const auto step = static_cast<int64_t>(step_of(work));
  const double factor = args.control->grad_factor;
  if (work.layout.param == DType::kFloat64) {
    args.scalars[i].as_double = adam_scalars<double>(hyper, step, factor);
  } else {
    args.scalars[i].as_float = adam_scalars<float>(hyper, step, factor);
  }
}

template <class T>
TORCHOPT_HD inline bool computed_in(const TensorWork& work) {
  return (work.layout.param == DType::kFloat64) == (sizeof(T) == sizeof(double));
}

template <class T>
TORCHOPT_HD inline const AdamScalars<T>& scalars_in(const TensorScalars& scalars) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return scalars.as_double;
  } else {
    return scalars.as_float;
  }
}

// A thread's share of a chunk, Width elements at a time.
template <int Width, class T>
TORCHOPT_HD inline void update_chunk(const AdamGroups<T>& groups, TensorArrays arrays,
                                     const Chunk& chunk, int thread, int threads) {
  uint64_t addresses[kArrays];
  int64_t sizes[kArrays];
  for (int a = 0; a < kArrays; ++a) {
    addresses[a] = address_of(arrays.array[a], chunk.begin);
    sizes[a] = a != kStep && arrays.array[a].memory != nullptr ? arrays.array[a].size : 0;
  }
  const VectorRange range = vector_range(addresses, sizes, Width, chunk.begin, chunk.end);
  note_alignment(arrays, range.begin, Width);
  for_each_access(
      range, Width, chunk.begin, chunk.end, thread, threads,
      [&](int64_t i) { groups.template update<Width, false>(arrays, i, nullptr); },
      [&](int64_t i) { groups.template update<1, false>(arrays, i, nullptr); });
}

// The elements of the tensors that are computed in T. A thread's group is 16 bytes of those held in
// T, and the 8 bytes beside 16 of fp32 of those held in 16 bits.
template <class T, class Cta>
TORCHOPT_HD inline void adam_body(Cta& cta, const AdamArgs& args) {
  if (args.control->skip != 0.0) {
    return;
  }
  cta.each([&](int thread) {
    for (int64_t c = cta.block; c < args.chunk_count; c += cta.blocks) {
      const Chunk chunk = args.chunks[c];
      const TensorWork work = args.tensors[chunk.tensor];
      if (work.memory[kGrad] != nullptr && computed_in<T>(work)) {
        const AdamScalars<T> scalars = scalars_in<T>(args.scalars[chunk.tensor]);
        update_chunk<16 / sizeof(T)>(AdamGroups<T>(work, args.options, scalars), arrays_of(work),
                                     chunk, thread, cta.threads);
      }
    }
  });
}

// A warp's step of one tile, with what it saw. By the block rule, thread t owns lanes 2t and
// 2t + 1. The result is thread 0's.
template <class T, class Warp>
TORCHOPT_HD inline ChunkTrace update_tile(const Warp& warp, const AdamGroups<T>& groups,
                                          const TensorArrays& arrays, int64_t begin, int64_t end) {
  using L = ScalarLane<double>;
  typename Warp::template PerThread<double> grad_even;
  typename Warp::template PerThread<double> grad_odd;
  typename Warp::template PerThread<double> update_even;
  typename Warp::template PerThread<double> update_odd;
  typename Warp::template PerThread<int64_t> lost;
  typename Warp::template PerThread<uint64_t> digest;
  warp.each([&](int thread) {
    GroupTrace<2> sum{};
    int64_t i = begin + 2 * thread;
    for (; i + 1 < end; i += kBlockLanes) {
      GroupTrace<2> trace;
      groups.template update<2, true>(arrays, i, &trace);
      for (int k = 0; k < 2; ++k) {
        sum.grad_square[k] = L::add(sum.grad_square[k], trace.grad_square[k]);
        sum.update_square[k] = L::add(sum.update_square[k], trace.update_square[k]);
      }
      sum.lost += trace.lost;
      sum.digest += trace.digest;
    }
    if (i < end) {
      GroupTrace<1> trace;
      groups.template update<1, true>(arrays, i, &trace);
      sum.grad_square[0] = L::add(sum.grad_square[0], trace.grad_square[0]);
      sum.update_square[0] = L::add(sum.update_square[0], trace.update_square[0]);
      sum.lost += trace.lost;
      sum.digest += trace.digest;
    }
    grad_even[thread] = sum.grad_square[0];
    grad_odd[thread] = sum.grad_square[1];
    update_even[thread] = sum.update_square[0];
    update_odd[thread] = sum.update_square[1];
    lost[thread] = sum.lost;
    digest[thread] = sum.digest;
  });
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    warp.fold(grad_even, distance);
    warp.fold(grad_odd, distance);
    warp.fold(update_even, distance);
    warp.fold(update_odd, distance);
    warp.fold(lost, distance);
    warp.fold(digest, distance);
  }
  return {L::add(grad_even[0], grad_odd[0]), L::add(update_even[0], update_odd[0]), lost[0],
          digest[0]};
}

// The same with a ChunkTrace for each chunk: a warp takes a tile, and the tiles are added in
// their order.
template <class T, class Cta>
TORCHOPT_HD inline void adam_traced_body(Cta& cta, const AdamArgs& args) {
  if (args.control->skip != 0.0) {
    return;
  }
  CtaShared& shared = cta.shared();
  const int warps = cta.threads / kWarpThreads;
  for (int64_t c = cta.block; c < args.chunk_count; c += cta.blocks) {
    const Chunk chunk = args.chunks[c];
    const TensorWork work = args.tensors[chunk.tensor];
    if (work.memory[kGrad] == nullptr || !computed_in<T>(work)) {
      continue;
    }
    TensorArrays arrays = arrays_of(work);
    note_alignment(arrays, chunk.begin, 2);
    const AdamGroups<T> groups(work, args.options, scalars_in<T>(args.scalars[chunk.tensor]));
    for (int64_t first = chunk.begin; first < chunk.end; first += warps * kTraceTile) {
      cta.each_warp([&](int warp_index, const auto& warp) {
        const int64_t begin = first + warp_index * kTraceTile;
        const int64_t end = chunk.end - begin < kTraceTile ? chunk.end : begin + kTraceTile;
        if (begin >= end) {
          return;
        }
        const ChunkTrace tile = update_tile(warp, groups, arrays, begin, end);
        warp.leader([&] { shared.tile[warp_index] = tile; });
      });
      cta.each([&](int thread) {
        if (thread != 0) {
          return;
        }
        if (first == chunk.begin) {
          shared.chunk = {};
        }
        for (int w = 0; w < warps && first + w * kTraceTile < chunk.end; ++w) {
          add_trace(shared.chunk, shared.tile[w]);
        }
        args.traces[c] = tracked(shared.chunk, args.options.track);
      });
    }
  }
}

// What was seen of tensor i, from its chunks, which lie together in the table.
TORCHOPT_HD inline void sum_traces_body(int64_t i, const AdamArgs& args) {
  if (i >= args.tensor_count || args.control->skip != 0.0) {
    return;
  }
  int64_t c = 0;
  for (int64_t end = args.chunk_count; c < end;) {
    const int64_t middle = c + (end - c) / 2;
    if (args.chunks[middle].tensor < i) {
      c = middle + 1;
    } else {
      end = middle;
    }
  }
  ChunkTrace sum{};
  for (; c < args.chunk_count && args.chunks[c].tensor == i; ++c) {
    add_trace(sum, args.traces[c]);
  }
  finish_trace(sum, *args.control, args.tensors[i].memory[kGrad] != nullptr, args.norms + 2 * i,
               args.counts + 2 * i);
}

}  // namespace
}  // namespace torchopt_ext

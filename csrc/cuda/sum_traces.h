// Makes a tracked step's report of each tensor from the traces of its chunks (adam_traced.h).
#pragma once

#include "cuda/adam.h"
#include "kernels/trace.h"

namespace torchopt_ext {

// The outputs of a tracked step, in device memory.
struct TraceArgs {
  ChunkTrace* chunks;  // one for each chunk
  double* norms;       // of each tensor, as in Traces
  int64_t* counts;
};

namespace {

// Returns the first chunk of tensor i or of a later tensor.
TORCHOPT_HD inline int64_t first_chunk(const Chunk* chunks, int64_t count, int64_t i) {
  int64_t c = 0;
  for (int64_t end = count; c < end;) {
    const int64_t middle = c + (end - c) / 2;
    if (chunks[middle].tensor < i) {
      c = middle + 1;
    } else {
      end = middle;
    }
  }
  return c;
}

using SharedTraces = ChunkTrace[kWarpThreads];

// Makes the report of tensor i from its chunks, which are adjacent in the table. A warp reads the
// chunks' traces, and one thread adds them in order.
template <class Warp>
TORCHOPT_HD inline void sum_traces_body(const Warp& warp, SharedTraces& shared, int64_t i,
                                        int64_t chunk_count, const AdamArgs& args,
                                        const TraceArgs& traces) {
  if (args.control->skip != 0.0) {
    return;
  }
  const int64_t first = first_chunk(args.chunks, chunk_count, i);
  const int64_t last = first_chunk(args.chunks, chunk_count, i + 1);
  ChunkTrace sum{};
  for (int64_t begin = first; begin < last; begin += kWarpThreads) {
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
    finish_trace(sum, *args.control, args.steps[i].grad != nullptr, traces.norms + 2 * i,
                 traces.counts + 2 * i);
  });
}

}  // namespace

// Must run after launch_adam_traced.
void launch_sum_traces(int64_t tensor_count, int64_t chunk_count, const AdamArgs& args,
                       const TraceArgs& traces, CUstream_st* stream);

}  // namespace torchopt_ext

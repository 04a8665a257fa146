// From what a step saw of chunks to what it reports of tensors. Free of torch.
#pragma once

#include "kernels/control.h"
#include "plan/chunk_table.h"

namespace torchopt_ext {
namespace {

// Only what `track` asks for (Track).
TORCHOPT_HD inline ChunkTrace tracked(const ChunkTrace& trace, uint32_t track) {
  const bool norms = (track & kTrackNorms) != 0;
  return {norms ? trace.grad_sumsq : 0.0, norms ? trace.update_sumsq : 0.0,
          (track & kTrackLost) != 0 ? trace.lost : 0,
          (track & kTrackDigest) != 0 ? trace.digest : 0};
}

// In the order of the chunks, so that the sums do not depend on threads.
TORCHOPT_HD inline void add_trace(ChunkTrace& sum, const ChunkTrace& chunk) {
  using L = ScalarLane<double>;
  sum.grad_sumsq = L::add(sum.grad_sumsq, chunk.grad_sumsq);
  sum.update_sumsq = L::add(sum.update_sumsq, chunk.update_sumsq);
  sum.lost += chunk.lost;
  sum.digest += chunk.digest;
}

// norms: of the unscaled gradient, of the update; counts: lost updates, digest.
TORCHOPT_HD inline void finish_trace(const ChunkTrace& sum, const Control& control,
                                     bool has_gradient, double* norms, int64_t* counts) {
  using L = ScalarLane<double>;
  norms[0] = has_gradient ? L::div(L::sqrt(sum.grad_sumsq), control.grad_scale) : 0.0;
  norms[1] = has_gradient ? L::sqrt(sum.update_sumsq) : 0.0;
  counts[0] = has_gradient ? sum.lost : 0;
  if (has_gradient) {
    counts[1] = static_cast<int64_t>(sum.digest);
  }
}

}  // namespace
}  // namespace torchopt_ext

// Tracking: what a step notes of each chunk while its values are in the cache, and what it reports
// of each tensor.
#pragma once

#include "kernels/control.h"

namespace torchopt_ext {

// What to note, as bits of StepOptions::track.
enum Track : uint32_t { kTrackNorms = 1, kTrackLost = 2, kTrackDigest = 4 };

struct ChunkTrace {
  double grad_sumsq;    // of the gradient as it is in memory, loss scale included
  double update_sumsq;  // of what was added to the stored weight
  int64_t lost;         // elements whose update rounded to nothing
  uint64_t digest;      // kernels/digest.h
};

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
  // Which of several NaNs is left depends on the order of additions within a register.
  norms[0] = has_gradient ? L::canonical(L::div(L::sqrt(sum.grad_sumsq), control.grad_scale)) : 0.0;
  norms[1] = has_gradient ? L::canonical(L::sqrt(sum.update_sumsq)) : 0.0;
  counts[0] = has_gradient ? sum.lost : 0;
  if (has_gradient) {
    counts[1] = static_cast<int64_t>(sum.digest);
  }
}

}  // namespace
}  // namespace torchopt_ext

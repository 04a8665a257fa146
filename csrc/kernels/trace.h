// Tracking: the statistics that a step collects of each chunk while the chunk is in the cache, and
// reports for each tensor.
#pragma once

#include "kernels/control.h"

namespace torchopt_ext {

// The statistics to collect, as bits of StepOptions::track.
enum Track : uint32_t { kTrackNorms = 1, kTrackLost = 2 };

// The elements of a tile, which the first-level cache holds. Norms are summed tile by tile, so
// their bits depend on this length, and both back ends must use the same.
inline constexpr int kTileElements = 512;

struct ChunkTrace {
  double grad_sumsq;    // of the gradient as it is in memory, loss scale included
  double update_sumsq;  // of the change of the stored weight
  int64_t lost;         // elements whose update rounded to nothing
};

namespace {

// Returns the fields that `track` (Track) asks for; the other fields are 0.
TORCHOPT_HD inline ChunkTrace tracked(const ChunkTrace& trace, uint32_t track) {
  const bool norms = (track & kTrackNorms) != 0;
  return {norms ? trace.grad_sumsq : 0.0, norms ? trace.update_sumsq : 0.0,
          (track & kTrackLost) != 0 ? trace.lost : 0};
}

// Adds a chunk. Callers add chunks in order, so that the sums do not depend on threads.
TORCHOPT_HD inline void add_trace(ChunkTrace& sum, const ChunkTrace& chunk) {
  using L = ScalarLane<double>;
  sum.grad_sumsq = L::add(sum.grad_sumsq, chunk.grad_sumsq);
  sum.update_sumsq = L::add(sum.update_sumsq, chunk.update_sumsq);
  sum.lost += chunk.lost;
}

// Writes the norms of the unscaled gradient and of the update to `norms`, and the lost updates.
TORCHOPT_HD inline void finish_trace(const ChunkTrace& sum, const Control& control,
                                     bool has_gradient, double* norms, int64_t& lost) {
  using L = ScalarLane<double>;
  // The order of additions in a register decides which of several NaNs remains.
  norms[0] = has_gradient ? L::canonical(L::div(L::sqrt(sum.grad_sumsq), control.grad_scale)) : 0.0;
  norms[1] = has_gradient ? L::canonical(L::sqrt(sum.update_sumsq)) : 0.0;
  lost = has_gradient ? sum.lost : 0;
}

}  // namespace
}  // namespace torchopt_ext

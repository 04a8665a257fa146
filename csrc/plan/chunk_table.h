// The work list of a step: what each tensor is (TensorWork) and the pieces it is cut into (Chunk).
// Free of torch; the same tables drive the CPU's threads and the CUDA grid, pass A and pass B.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/adam_args.h"

namespace torchopt_ext {

// One parameter of a step. Pointers are to dense storage; element index is storage order. A scaled
// copy uses `param`, which it writes, `grad`, which it reads, their dtypes and numel.
struct TensorWork {
  void* param;
  void* grad;  // null: no gradient in this step, the tensor stays as it is
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  void* master;          // fp32 master weight or int16 remainder; null if the parameter is all
  float* step;
  int64_t numel;
  int64_t row_length;  // the unit that blocks never cross: kernels/block_rule.h
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
  Weights weights;
  int32_t group;  // index of its hyperparameters
  // The whole parameter's index and this shard's place in it, for draws and digests, which do not
  // depend on sharding: element i is element global_element(work, i) of parameter `index`.
  uint32_t index;
  int64_t first_element;
  int64_t run;     // elements of the shard that follow one another in the parameter; 0: all do
  int64_t stride;  // from one such run to the next
};

namespace {

TORCHOPT_HD inline int64_t global_element(const TensorWork& work, int64_t i) {
  return work.first_element + (work.run == 0 ? i : i / work.run * work.stride + i % work.run);
}

}  // namespace

// What a step may note of each tensor (ChunkTrace), as bits of StepOptions::track.
enum Track : uint32_t { kTrackNorms = 1, kTrackLost = 2, kTrackDigest = 4 };

// What a step does beyond the update, the same for all its tensors.
struct StepOptions {
  bool stochastic_rounding = false;   // bf16 parameters without master, and bf16 moments
  bool write_back_gradients = false;  // gradients become unscaled and clipped in memory, too
  uint32_t track = 0;                 // what to note in a ChunkTrace of each chunk
  uint64_t rounding_seed = 0;
};

namespace {

// Whether what a step stores of a tensor takes random bits: not where an fp32 master or a remainder
// keeps what the parameter loses.
TORCHOPT_HD inline bool rounds_randomly(const StepOptions& options, const TensorWork& work) {
  return options.stochastic_rounding &&
         ((work.param_dtype == DType::kBFloat16 && work.weights == Weights::kPlain) ||
          work.state_dtype == DType::kBFloat16);
}

}  // namespace

// What a step saw of one chunk while its values were in the cache.
struct ChunkTrace {
  double grad_sumsq;    // of the gradient as it is in memory, scaled
  double update_sumsq;  // of what was added to the stored weight
  int64_t lost;         // elements whose update rounded to nothing
  uint64_t digest;      // kernels/digest.h
};

// Elements [begin, end) of a tensor. Both ends are block boundaries, so that pass A gives the same
// block sums whatever the chunks are.
struct Chunk {
  int32_t tensor;
  int64_t begin;
  int64_t end;
};

// About this many elements a chunk: 128 KB of fp32, long enough to stream, short enough to balance.
inline constexpr int64_t kChunkElements = 32768;

// Cuts tensors into chunks; empty tensors get none.
std::vector<Chunk> make_chunks(const std::vector<TensorWork>& tensors,
                               int64_t chunk_elements = kChunkElements);

// The work of chunks [0, i) for every i, in bytes of parameters: the scale threads are balanced on.
std::vector<int64_t> cumulative_bytes(const std::vector<TensorWork>& tensors,
                                      const std::vector<Chunk>& chunks);

// The chunks [first, second) of share `index` of `shares`: about equal bytes, together all chunks.
std::pair<size_t, size_t> share_of(const std::vector<int64_t>& cumulative, int64_t index,
                                   int64_t shares);

}  // namespace torchopt_ext

// The work list of a step: what each tensor is (TensorWork) and the pieces it is cut into (Chunk).
// Free of torch; the same tables drive the CPU's threads and the CUDA grid, pass A and pass B.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/dtype.h"

namespace torchopt_ext {

// One parameter of a step. Pointers are to dense storage; element index is storage order.
struct TensorWork {
  void* param;
  const void* grad;  // null: no gradient in this step, the tensor stays as it is
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  float* step;
  int64_t numel;
  int64_t row_length;  // the unit that blocks never cross: kernels/block_rule.h
  DType param_dtype;   // of the gradient too
  DType state_dtype;
  int32_t group;  // index of its hyperparameters
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

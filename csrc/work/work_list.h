// The work list of a step: its tensors and the chunks into which they are cut. The CPU's threads
// and the CUDA grid use it, in pass A and pass B. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/kinds.h"

namespace torchopt_ext {

// Elements [begin, begin + count) of a tensor.
struct Chunk {
  int32_t tensor;
  int32_t count;
  int64_t begin;
  TORCHOPT_HD int64_t end() const { return begin + count; }
};

// Elements [begin, end) of a tensor, cut where make_chunks() may cut.
struct ElementRange {
  int64_t begin;
  int64_t end;
};

struct WorkList {
  std::vector<TensorWork> tensors;
  std::vector<ElementRange> ranges;  // by tensor: what the list's passes take; if empty, all
  std::vector<Chunk> chunks;
  std::vector<int64_t> cumulative;  // cumulative_bytes
  StepOptions options;
  // A back end's copy of the tables, kept between steps; null if the back end needs none.
  mutable std::shared_ptr<void> device_tables;

  // Cuts the tensors into chunks again after they changed.
  void split_into_chunks();
};

// Returns the elements of a tensor that the passes of a list take.
ElementRange range_of(const std::vector<TensorWork>& tensors,
                      const std::vector<ElementRange>& ranges, size_t t);

// The approximate chunk size: 128 KB of fp32, long enough to stream, short enough to balance.
inline constexpr int64_t kChunkElements = 32768;

// Cuts tensors into chunks at block boundaries, so that pass A gives the same block sums for any
// chunks. Empty tensors get no chunks.
std::vector<Chunk> make_chunks(const std::vector<TensorWork>& tensors,
                               int64_t chunk_elements = kChunkElements,
                               const std::vector<ElementRange>& ranges = {});

// Cuts each tensor into chunks of elements(tensor) elements, for work that needs no block
// boundaries, and adds them to `chunks`; skips tensors for which elements() is 0. On a GPU chunks
// are a multiple of 128 bytes in every array: a step over chunks that begin inside a line of memory
// takes a tenth longer. Tensors with 8-bit moments are cut at groups, as by make_chunks.
void add_plain_chunks(const std::vector<TensorWork>& tensors,
                      const std::function<int64_t(const TensorWork&)>& elements,
                      std::vector<Chunk>& chunks, const std::vector<ElementRange>& ranges = {});

// Returns the first chunk of each range of `range` tensors, followed by the number of chunks.
std::vector<int64_t> first_chunks(const std::vector<Chunk>& chunks, size_t tensors, size_t range);

// Returns the bytes of parameters of chunks [0, i) for every i, by which threads are balanced.
std::vector<int64_t> cumulative_bytes(const std::vector<TensorWork>& tensors,
                                      const std::vector<Chunk>& chunks);

// Returns the first chunk of share `share` of `shares` shares of about equal bytes: 0 for the first
// share, and the number of chunks if share == shares. Bytes times shares must fit in int64_t.
size_t first_of_share(const std::vector<int64_t>& cumulative, int64_t share, int64_t shares);

}  // namespace torchopt_ext

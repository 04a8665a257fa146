// The work list of a step: its tensors and the chunks they are cut into, the same for the CPU's
// threads and the CUDA grid, for pass A and pass B. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/tensor_work.h"

namespace torchopt_ext {

// Elements [begin, begin + count) of a tensor.
struct Chunk {
  int32_t tensor;
  int32_t count;
  int64_t begin;
  TORCHOPT_HD int64_t end() const { return begin + count; }
};

// A back end's copy of a work list's tables, kept between steps; null where it needs none.
struct DeviceTables {
  virtual ~DeviceTables() = default;
};

struct WorkList {
  std::vector<TensorWork> tensors;
  std::vector<Chunk> chunks;
  std::vector<int64_t> cumulative;  // cumulative_bytes
  StepOptions options;
  mutable std::shared_ptr<DeviceTables> device_tables;

  // Cuts the tensors anew, after they changed.
  void split_into_chunks();
};

// About this many elements a chunk: 128 KB of fp32, long enough to stream, short enough to balance.
inline constexpr int64_t kChunkElements = 32768;

// Cuts tensors into chunks at block boundaries, so that pass A gives the same block sums whatever
// the chunks are. Empty tensors get none.
std::vector<Chunk> make_chunks(const std::vector<TensorWork>& tensors,
                               int64_t chunk_elements = kChunkElements);

// Cuts each tensor every so many elements, for work that needs no block boundaries, and adds the
// chunks to `chunks`; a tensor with 0 is left out. On a GPU they are a multiple of 128 bytes in
// every array: a step over chunks that begin within a line of memory takes a tenth longer. Tensors
// with 8-bit moments are cut as by make_chunks, at groups.
void add_plain_chunks(const std::vector<TensorWork>& tensors,
                      const std::function<int64_t(const TensorWork&)>& elements,
                      std::vector<Chunk>& chunks);

// The first chunk of each range of so many tensors, and behind the last range the number of chunks.
std::vector<int64_t> first_chunks(const std::vector<Chunk>& chunks, size_t tensors, size_t range);

// The work of chunks [0, i) for every i, in bytes of parameters: the scale threads are balanced on.
std::vector<int64_t> cumulative_bytes(const std::vector<TensorWork>& tensors,
                                      const std::vector<Chunk>& chunks);

// The chunks [first, second) of share `index` of `shares`: about equal bytes, together all chunks.
std::pair<size_t, size_t> share_of(const std::vector<int64_t>& cumulative, int64_t index,
                                   int64_t shares);

}  // namespace torchopt_ext

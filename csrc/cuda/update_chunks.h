// How tensors are cut for pass B, where each block of threads updates a chunk.
#pragma once

#include "work/work_list.h"

namespace torchopt_ext::cuda {

class UpdateChunks {
 public:
  explicit UpdateChunks(const WorkList& work);

  // Adds the chunks of the tensors for which `takes` holds.
  void add(const std::function<bool(const TensorWork&)>& takes, std::vector<Chunk>& chunks) const;

 private:
  int64_t length_of(const TensorWork& tensor) const;

  const WorkList& work_;
  int64_t on_host_ = 0;  // elements of all tensors with states on the host
};

}  // namespace torchopt_ext::cuda

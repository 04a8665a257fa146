// Pass B of any kind as the body of a CUDA kernel.
#pragma once

#include "cuda/update.h"
#include "cuda/update_quantized.h"

namespace torchopt_ext {
namespace {

template <Kind kKind>
using ChunkOf = std::conditional_t<is_quantized(kKind), QuantizedChunk<kKind>, UpdateChunk<kKind>>;

// Updates a block's chunk, which must be of a tensor of this kind.
template <Kind kKind, class Cta>
TORCHOPT_HD inline void pass_b_body(const Cta& cta, const UpdateArgs& args) {
  const Chunk chunk = args.chunks[cta.block];
  if (args.steps[chunk.tensor].grad != nullptr) {
    update_chunk(cta, ChunkOf<kKind>(args, chunk));
  }
}

}  // namespace
}  // namespace torchopt_ext

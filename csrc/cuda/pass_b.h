// Pass B of any kind as a CUDA kernel.
#pragma once

#include "cuda/update.h"
#include "cuda/update_quantized.h"

namespace torchopt_ext {
namespace {

template <Kind kKind>
using ChunkOf = std::conditional_t<is_quantized(kKind), QuantizedChunk<kKind>, UpdateChunk<kKind>>;

// Updates a block's chunk, which must be of a tensor of this kind. Blocks on a multiprocessor: four
// where registers suffice, with 64 to 112 bytes of loads in flight in each thread. On an H100 four
// blocks took a tenth less time than three over 2,000 tensors of 1,000, and 2 % less over large
// tensors in chunks of one or two iterations of a block (passes.cpp). With 8-bit moments three took
// 3 % (fp32), 13 % (bf16), 14 % (stochastic) and 13 % (8-bit remainders, although they spill 6
// registers) less than two.
// A number for the kind: nvcc cannot name values of an enumeration without enumerators.
template <int kKind>
struct UpdateKernel : KernelOf<kUpdateThreads, kTraits<Kind{kKind}>.blocks> {
  UpdateArgs args;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    const Chunk chunk = args.chunks[cta.block];
    if (args.steps[chunk.tensor].grad != nullptr) {
      update_chunk(cta, ChunkOf<Kind{kKind}>(args, chunk));
    }
  }
};

}  // namespace

// Must run once for each kind that tensors have.
void launch_update(Kind kind, const UpdateArgs& args, int64_t chunk_count, CUstream_st* stream);

}  // namespace torchopt_ext

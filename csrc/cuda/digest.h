// The digest (kernels/digest.h) as a CUDA kernel: a warp adds a chunk.
#pragma once

#include "cuda/launch.h"
#include "kernels/digest.h"
#include "work/work_list.h"

namespace torchopt_ext {

static_assert(kDigestThreads == kWarpThreads);

// Pointers are to device memory.
struct DigestKernel : KernelOf<256, 4> {
  const DigestArray* arrays;
  const Chunk* chunks;
  int64_t chunk_count;
  int64_t* digests;  // of each array

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    cta.each_warp([&](int warp_index, const auto& warp) {
      const int64_t c = cta.block * (cta.threads / kWarpThreads) + warp_index;
      if (c >= chunk_count) {
        return;
      }
      const Chunk chunk = chunks[c];
      auto sums = warp_digest(warp, arrays[chunk.tensor], chunk.begin, chunk.end(), [](int word) {
        return upper_half_factor(static_cast<uint32_t>(word));
      });
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        warp.fold(sums, distance);
      }
      warp.leader([&] { Cta::add(digests + chunk.tensor, static_cast<int64_t>(sums[0])); });
    });
  }
};

}  // namespace torchopt_ext

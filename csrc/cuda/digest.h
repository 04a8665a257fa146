// The digest (kernels/digest.h) as a CUDA kernel's body: a warp adds a chunk.
#pragma once

#include "cuda/cta.h"
#include "kernels/digest.h"
#include "work/work_list.h"

namespace torchopt_ext {

inline constexpr int kDigestBlock = 256;  // threads
static_assert(kDigestThreads == kWarpThreads);

// Pointers are to device memory.
struct DigestArgs {
  const DigestArray* arrays;
  const Chunk* chunks;
  int64_t chunk_count;
  int64_t* digests;  // of each array
};

namespace {

template <class Cta>
TORCHOPT_HD inline void digest_body(const Cta& cta, const DigestArgs& args) {
  cta.each_warp([&](int warp_index, const auto& warp) {
    const int64_t c = cta.block * (cta.threads / kWarpThreads) + warp_index;
    if (c >= args.chunk_count) {
      return;
    }
    const Chunk chunk = args.chunks[c];
    auto sums =
        warp_digest(warp, args.arrays[chunk.tensor], chunk.begin, chunk.end(),
                    [](int word) { return upper_half_factor(static_cast<uint32_t>(word)); });
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      warp.fold(sums, distance);
    }
    warp.leader([&] { Cta::add(args.digests + chunk.tensor, static_cast<int64_t>(sums[0])); });
  });
}

}  // namespace

void launch_digest(const DigestArgs& args, CUstream_st* stream);

}  // namespace torchopt_ext

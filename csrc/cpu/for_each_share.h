// One parallel region over a whole work list, balanced by bytes rather than tensor by tensor.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/float_mode.h"
#include "work/work_list.h"

namespace torchopt_ext {

// Below this many bytes a second thread costs more time than it saves.
inline constexpr int64_t kBytesPerThread = 32768;

// Calls body(first, last) on ranges of chunks, in parallel and in the mode that FloatMode sets.
template <class Body>
void for_each_share(const WorkList& work, const Body& body) {
  if (work.chunks.empty()) {
    return;
  }
  const int64_t useful = work.cumulative.back() / kBytesPerThread + 1;
  const int64_t shares = std::min<int64_t>(at::get_num_threads(), useful);
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    const FloatMode mode;
    for (int64_t share = begin; share < end; ++share) {
      const auto [first, last] = share_of(work.cumulative, share, shares);
      body(first, last);
    }
  });
}

}  // namespace torchopt_ext

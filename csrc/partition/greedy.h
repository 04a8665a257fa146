// Greedy plan: which rank owns which whole tensor. A pure function of sizes and loads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace torchopt_ext {

// Assigns whole tensors, largest first (ties in the order given), each to the first rank with the
// least load: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters. `loads` holds
// the elements each rank already has and is updated. Among ranks of equal load the rank with the
// least of `tie_loads`, which do not change, comes first. Returns the rank of every tensor.
inline std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels,
                                             std::vector<int64_t>& loads,
                                             const std::vector<int64_t>& tie_loads) {
  std::vector<size_t> order(numels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return numels[a] > numels[b]; });
  std::vector<size_t> ranks(loads.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  std::vector<int64_t> rank_of(numels.size());
  for (const size_t i : order) {
    const size_t least = *std::min_element(ranks.begin(), ranks.end(), [&](size_t a, size_t b) {
      return std::pair(loads[a], tie_loads[a]) < std::pair(loads[b], tie_loads[b]);
    });
    rank_of[i] = static_cast<int64_t>(least);
    loads[least] += numels[i];
  }
  return rank_of;
}

}  // namespace torchopt_ext

// Partition plans: which rank owns which tensor. Pure functions of sizes and world size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace torchopt_ext {

// Whole tensors, largest first (ties in the order given), each to the first rank with the least
// load: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters. `loads` holds the
// elements each rank already has and is updated. Returns the rank of every tensor.
inline std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels,
                                             std::vector<int64_t>& loads) {
  std::vector<size_t> order(numels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return numels[a] > numels[b]; });
  std::vector<int64_t> rank_of(numels.size());
  for (const size_t i : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    rank_of[i] = least - loads.begin();
    *least += numels[i];
  }
  return rank_of;
}

}  // namespace torchopt_ext

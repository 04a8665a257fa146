// partition_greedy: assigns whole tensors, largest first, each to the first rank with the least
// load. Returns the rank of every tensor in the given order. `initial_loads` are elements that
// ranks already hold. Among ranks of equal load the rank with the least of `tie_loads` comes first.
#include <torchopt_ext/partition.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "ops/operator.h"
#include "ops/partition_checks.h"

namespace torchopt_ext {
namespace {

std::vector<int64_t> loads_or_zeros(at::OptionalIntArrayRef loads, const char* name,
                                    int64_t world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  if (!loads.has_value()) {
    return std::vector<int64_t>(ranks, 0);
  }
  TORCH_CHECK_VALUE(loads->size() == ranks, "got ", loads->size(), " ", name, " for world_size ",
                    world_size);
  for (size_t rank = 0; rank < ranks; ++rank) {
    TORCH_CHECK_VALUE((*loads)[rank] >= 0, name, "[", rank, "] is ", (*loads)[rank],
                      ", expected 0 or more");
  }
  return loads->vec();
}

// torch's ZeroRedundancyOptimizer._partition_parameters, with loads to start from.
std::vector<int64_t> partition_greedy_op(at::IntArrayRef numels, int64_t world_size,
                                         at::OptionalIntArrayRef initial_loads,
                                         at::OptionalIntArrayRef tie_loads) {
  check_world_size(world_size);
  const std::vector<int64_t> loads = loads_or_zeros(initial_loads, "initial_loads", world_size);
  check_numels(numels, *std::max_element(loads.begin(), loads.end()),
               std::numeric_limits<int64_t>::max(),
               "all numels together, added to the largest of initial_loads, are 2**63 or more");
  const std::vector<int64_t> ties = loads_or_zeros(tie_loads, "tie_loads", world_size);
  std::vector<size_t> order(numels.size());  // largest first, ties in the order given
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return numels[a] > numels[b]; });
  using Rank = std::tuple<int64_t, int64_t, int64_t>;  // load, tie, number
  std::vector<Rank> ranks;
  ranks.reserve(loads.size());
  for (size_t r = 0; r < loads.size(); ++r) {
    ranks.emplace_back(loads[r], ties[r], static_cast<int64_t>(r));
  }
  std::priority_queue least(std::greater<>{}, std::move(ranks));
  std::vector<int64_t> rank_of(numels.size());
  for (const size_t i : order) {
    const auto [load, tie, rank] = least.top();
    rank_of[i] = rank;
    least.pop();
    least.emplace(load + numels[i], tie, rank);
  }
  return rank_of;
}

const Operator kPartitionGreedy(
    "partition_greedy",
    "(int[] numels, int world_size, int[]? initial_loads=None, int[]? tie_loads=None) -> "
    "int[]",
    partition_greedy_op);

}  // namespace

std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels, int64_t world_size) {
  return partition_greedy_op(numels, world_size, std::nullopt, std::nullopt);
}

}  // namespace torchopt_ext

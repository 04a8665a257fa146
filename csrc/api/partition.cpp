#include <torchopt_ext/partition.h>

#include "ops/operators.h"

namespace torchopt_ext {

std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels, int64_t world_size) {
  return partition_greedy_op(numels, world_size, std::nullopt, std::nullopt);
}

BalancedPartition partition_balanced(const std::vector<int64_t>& numels,
                                     const std::vector<int64_t>& row_lengths, int64_t world_size,
                                     std::optional<int64_t> bucket_elements, int64_t alignment) {
  return std::make_from_tuple<BalancedPartition>(
      partition_balanced_op(numels, row_lengths, world_size, bucket_elements, alignment));
}

}  // namespace torchopt_ext

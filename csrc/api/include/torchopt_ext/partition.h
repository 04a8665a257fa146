// Functions that decide which rank steps what when optimizer state is sharded. The results depend
// on sizes and world size alone. The functions raise c10::ValueError for an argument out of range.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torchopt_ext {

// Assigns whole tensors, largest first, each to the least loaded rank, as torch's
// ZeroRedundancyOptimizer does. Returns the rank of every tensor.
std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels, int64_t world_size);

// Tensors laid one after the other into buckets. Every rank has one interval of each bucket.
struct BalancedPartition {
  std::vector<int64_t> buckets;  // by tensor
  std::vector<int64_t> starts;   // by tensor: offset in its bucket, in elements
  std::vector<int64_t> lengths;  // by bucket, in elements
  std::vector<int64_t> cuts;     // world_size + 1 per bucket: the ends of the ranks' intervals
};

// Returns intervals of about equal length. Their sums of squares add up to those of whole tensors
// to the bit (docs/numerics.md section 3). `row_lengths`: the length of each tensor's rows, numel
// divided by its first size. `bucket_elements`: the target size of a bucket; chosen for the world
// size if not given.
BalancedPartition partition_balanced(const std::vector<int64_t>& numels,
                                     const std::vector<int64_t>& row_lengths, int64_t world_size,
                                     std::optional<int64_t> bucket_elements = std::nullopt,
                                     int64_t alignment = 64);

}  // namespace torchopt_ext

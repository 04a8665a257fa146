// Which rank steps what, when optimizer state is shared out: pure functions of sizes and world
// size, equal on all ranks. They raise c10::ValueError for an argument out of range.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torchopt_ext {

// The rank of every tensor: whole tensors, largest first, each to the least loaded rank, as torch's
// ZeroRedundancyOptimizer decides it.
std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels, int64_t world_size);

// Tensors laid one after the other into buckets, of each of which every rank has one interval.
struct BalancedPartition {
  std::vector<int64_t> buckets;  // of each tensor
  std::vector<int64_t> starts;   // of each tensor in its bucket, in elements
  std::vector<int64_t> lengths;  // of each bucket, in elements
  std::vector<int64_t> cuts;     // world_size + 1 of each bucket, where the ranks' intervals meet
};

// Intervals of about equal length whose sums of squares add up to those of whole tensors, to the
// bit (docs/numerics.md section 3). `row_lengths`: the elements of each tensor's rows, numel
// divided by its first size. `bucket_elements`: where a bucket ends; chosen for the world size if
// not given.
BalancedPartition partition_balanced(const std::vector<int64_t>& numels,
                                     const std::vector<int64_t>& row_lengths, int64_t world_size,
                                     std::optional<int64_t> bucket_elements = std::nullopt,
                                     int64_t alignment = 64);

}  // namespace torchopt_ext

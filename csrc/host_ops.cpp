// Operators on plain numbers, which run on the host whatever the device.
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "kernels/float_mode.h"
#include "kernels/partition_balanced.h"
#include "kernels/partition_buckets.h"
#include "kernels/partition_greedy.h"
#include "schedule_args.h"

namespace torchopt_ext {
namespace {

double lr_factor_op(int64_t step, int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                    c10::string_view decay_type, double min_factor, int64_t generation) {
  TORCH_CHECK_VALUE(step >= 0, "step is ", step, ", expected 0 or more");
  const FloatMode mode;
  return lr_factor(
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation),
      step);
}

// Sums of this many elements are exact as doubles, and far from the end of int64_t.
constexpr int64_t kMostElements = int64_t{1} << 53;
constexpr int64_t kInt32End = int64_t{1} << 31;

void check_world_size(int64_t world_size) {
  TORCH_CHECK_VALUE(world_size > 0 && world_size < kInt32End, "world_size is ", world_size,
                    ", expected 1 or more and less than 2**31");
}

void check_numels(at::IntArrayRef numels) {
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(numels[i] >= 0, "numels[", i, "] is ", numels[i], ", expected 0 or more");
  }
}

// `sum` is what the numels are added to, `most` what they may reach, described by `limit`.
void check_total(at::IntArrayRef numels, int64_t sum = 0, int64_t most = kMostElements,
                 const char* limit = "all numels together are more than 2**53") {
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(numels[i] <= most - sum, "numels[", i, "] is ", numels[i], ": ", limit);
    sum += numels[i];
  }
}

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

std::vector<int64_t> partition_greedy_op(at::IntArrayRef numels, int64_t world_size,
                                         at::OptionalIntArrayRef initial_loads,
                                         at::OptionalIntArrayRef tie_loads) {
  check_world_size(world_size);
  check_numels(numels);
  std::vector<int64_t> loads = loads_or_zeros(initial_loads, "initial_loads", world_size);
  check_total(numels, *std::max_element(loads.begin(), loads.end()),
              std::numeric_limits<int64_t>::max(),
              "all numels together, added to the largest of initial_loads, are 2**63 or more");
  return partition_greedy(numels.vec(), loads, loads_or_zeros(tie_loads, "tie_loads", world_size));
}

std::vector<int64_t> partition_buckets_op(at::IntArrayRef numels, at::IntArrayRef bucket_lengths,
                                          int64_t world_size, bool shard_buckets) {
  check_world_size(world_size);
  check_numels(numels);
  check_total(numels);
  auto left = static_cast<int64_t>(numels.size());
  for (size_t b = 0; b < bucket_lengths.size(); ++b) {
    TORCH_CHECK_VALUE(bucket_lengths[b] > 0, "bucket_lengths[", b, "] is ", bucket_lengths[b],
                      ", expected 1 or more");
    TORCH_CHECK_VALUE(bucket_lengths[b] <= left, "bucket_lengths[", b, "] is ", bucket_lengths[b],
                      ", but ", left, " of ", numels.size(), " numels are left");
    left -= bucket_lengths[b];
  }
  TORCH_CHECK_VALUE(left == 0, "bucket_lengths leave out ", left, " of ", numels.size(), " numels");
  std::vector<int64_t> rows;
  for (const BucketAssignment& row :
       shard_buckets ? partition_sharded_buckets(numels.vec(), bucket_lengths.vec(), world_size)
                     : partition_whole_buckets(bucket_lengths.vec(), world_size)) {
    rows.insert(rows.end(), {row.bucket, row.offset, row.length, row.rank});
  }
  return rows;
}

std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>
partition_balanced_op(at::IntArrayRef numels, at::IntArrayRef row_lengths, int64_t world_size,
                      std::optional<int64_t> bucket_elements, int64_t alignment) {
  check_world_size(world_size);
  check_numels(numels);
  check_total(numels);
  TORCH_CHECK_VALUE(row_lengths.size() == numels.size(), "got ", row_lengths.size(),
                    " row_lengths for ", numels.size(), " numels");
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(row_lengths[i] > 0, "row_lengths[", i, "] is ", row_lengths[i],
                      ", expected 1 or more");
    TORCH_CHECK_VALUE(numels[i] % row_lengths[i] == 0, "row_lengths[", i, "] is ", row_lengths[i],
                      ", which does not divide numels[", i, "], ", numels[i]);
  }
  const int64_t target = bucket_elements.value_or(usual_bucket_elements(world_size));
  TORCH_CHECK_VALUE(target > 0, "bucket_elements is ", target, ", expected 1 or more");
  // 2**31 paddings of 2**31 elements still fit.
  TORCH_CHECK_VALUE(alignment > 0 && alignment < kInt32End, "alignment is ", alignment,
                    ", expected 1 or more and less than 2**31");
  BalancedPlan plan = partition_balanced(numels.vec(), row_lengths.vec(), world_size,
                                         std::min(target, kMostElements), alignment);
  return {std::move(plan.layout.buckets), std::move(plan.layout.starts),
          std::move(plan.layout.lengths), std::move(plan.cuts)};
}

}  // namespace

TORCH_LIBRARY_IMPL(torchopt_ext, CompositeExplicitAutograd, m) {
  m.impl("lr_factor", lr_factor_op);
  m.impl("partition_greedy", partition_greedy_op);
  m.impl("partition_buckets", partition_buckets_op);
  m.impl("partition_balanced", partition_balanced_op);
}

}  // namespace torchopt_ext

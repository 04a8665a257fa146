// partition_balanced: lays tensors one after the other into buckets and cuts each bucket into one
// interval per rank. Returns the tensors' buckets and starts, the buckets' lengths, and per bucket
// world_size + 1 cuts.
#include "ops/operator.h"
#include "ops/operators.h"
#include "ops/partition_checks.h"
#include "partition/balanced.h"

namespace torchopt_ext {

std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>
partition_balanced_op(at::IntArrayRef numels, at::IntArrayRef row_lengths, int64_t world_size,
                      std::optional<int64_t> bucket_elements, int64_t alignment) {
  check_world_size(world_size);
  check_numels(numels);
  TORCH_CHECK_VALUE(row_lengths.size() == numels.size(), "got ", row_lengths.size(),
                    " row_lengths for ", numels.size(), " numels");
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(row_lengths[i] > 0, "row_lengths[", i, "] is ", row_lengths[i],
                      ", expected 1 or more");
    TORCH_CHECK_VALUE(numels[i] % row_lengths[i] == 0, "row_lengths[", i, "] is ", row_lengths[i],
                      ", which does not divide numels[", i, "], ", numels[i]);
  }
  const int64_t target = bucket_elements.value_or(default_bucket_elements(world_size));
  TORCH_CHECK_VALUE(target > 0, "bucket_elements is ", target, ", expected 1 or more");
  // 2**31 paddings of 2**31 elements still fit in int64_t.
  TORCH_CHECK_VALUE(alignment > 0 && alignment < kInt32End, "alignment is ", alignment,
                    ", expected 1 or more and less than 2**31");
  BalancedPlan plan = partition_balanced(numels.vec(), row_lengths.vec(), world_size,
                                         std::min(target, kMaxElements), alignment);
  return {std::move(plan.buckets), std::move(plan.starts), std::move(plan.lengths),
          std::move(plan.cuts)};
}

namespace {

const Operator kPartitionBalanced(
    "partition_balanced",
    "(int[] numels, int[] row_lengths, int world_size, int? bucket_elements=None, int "
    "alignment=64) -> (int[] buckets, int[] starts, int[] lengths, int[] cuts)",
    partition_balanced_op);

}  // namespace
}  // namespace torchopt_ext

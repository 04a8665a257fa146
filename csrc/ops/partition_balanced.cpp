// partition_balanced: lays tensors one after the other into buckets and cuts each bucket into one
// interval per rank. Returns the tensors' buckets and starts, the buckets' lengths, and per bucket
// world_size + 1 cuts.
#include "ops/balanced_cuts.h"
#include "ops/operator.h"
#include "ops/partition_checks.h"

namespace torchopt_ext {

BalancedPartition partition_balanced(const std::vector<int64_t>& numels,
                                     const std::vector<int64_t>& row_lengths, int64_t world_size,
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
  BalancedPartition plan = lay_out_buckets(numels, std::min(target, kMaxElements), alignment);
  auto begin = plan.buckets.begin();
  for (size_t b = 0; b < plan.lengths.size(); ++b) {
    const auto end = std::upper_bound(begin, plan.buckets.end(), static_cast<int64_t>(b));
    const auto of_bucket = [&](const std::vector<int64_t>& all) {
      return std::span(all).subspan(begin - plan.buckets.begin(), end - begin);
    };
    const CutPlaces places{of_bucket(plan.starts), of_bucket(numels), of_bucket(row_lengths),
                           plan.lengths[b], alignment};
    const std::vector<int64_t> cuts = balanced_cuts(places, world_size);
    plan.cuts.insert(plan.cuts.end(), cuts.begin(), cuts.end());
    begin = end;
  }
  return plan;
}

namespace {

using Numbers = std::vector<int64_t>;

std::tuple<Numbers, Numbers, Numbers, Numbers> partition_balanced_op(
    at::IntArrayRef numels, at::IntArrayRef row_lengths, int64_t world_size,
    std::optional<int64_t> bucket_elements, int64_t alignment) {
  auto [buckets, starts, lengths, cuts] =
      partition_balanced(numels.vec(), row_lengths.vec(), world_size, bucket_elements, alignment);
  return {std::move(buckets), std::move(starts), std::move(lengths), std::move(cuts)};
}

const Operator kPartitionBalanced(
    "partition_balanced",
    "(int[] numels, int[] row_lengths, int world_size, int? bucket_elements=None, int "
    "alignment=64) -> (int[] buckets, int[] starts, int[] lengths, int[] cuts)",
    partition_balanced_op);

}  // namespace
}  // namespace torchopt_ext

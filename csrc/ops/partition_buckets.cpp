// partition_buckets: decides which rank steps which parameters of DistributedDataParallel's
// gradient buckets, as torch's ZeroRedundancyOptimizer does. Returns rows of bucket, first
// parameter, number of parameters and rank. `numels` are the parameters' sizes, bucket by bucket.
#include "ops/operator.h"
#include "ops/partition_checks.h"
#include "partition/buckets.h"

namespace torchopt_ext {
namespace {

std::vector<int64_t> partition_buckets_op(at::IntArrayRef numels, at::IntArrayRef bucket_lengths,
                                          int64_t world_size, bool shard_buckets) {
  check_world_size(world_size);
  check_numels(numels);
  auto left = static_cast<int64_t>(numels.size());
  for (size_t b = 0; b < bucket_lengths.size(); ++b) {
    TORCH_CHECK_VALUE(bucket_lengths[b] > 0, "bucket_lengths[", b, "] is ", bucket_lengths[b],
                      ", expected 1 or more");
    TORCH_CHECK_VALUE(bucket_lengths[b] <= left, "bucket_lengths[", b, "] is ", bucket_lengths[b],
                      ", but ", left, " of ", numels.size(), " numels are left");
    left -= bucket_lengths[b];
  }
  TORCH_CHECK_VALUE(left == 0, "bucket_lengths leave out ", left, " of ", numels.size(), " numels");
  return shard_buckets ? partition_sharded_buckets(numels.vec(), bucket_lengths.vec(), world_size)
                       : partition_whole_buckets(bucket_lengths.vec(), world_size);
}

const Operator kPartitionBuckets(
    "partition_buckets",
    "(int[] numels, int[] bucket_lengths, int world_size, bool shard_buckets) -> int[]",
    partition_buckets_op);

}  // namespace
}  // namespace torchopt_ext

// partition_buckets: decides which rank steps which parameters of DistributedDataParallel's
// gradient buckets, as torch's ZeroRedundancyOptimizer does. Returns rows of bucket, first
// parameter, number of parameters and rank. `numels` are the parameters' sizes, bucket by bucket.
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

#include "ops/operator.h"
#include "ops/partition_checks.h"

namespace torchopt_ext {
namespace {

// Assigns whole buckets to ranks in turn: ZeroRedundancyOptimizer._get_assigned_rank.
std::vector<int64_t> whole_buckets(at::IntArrayRef bucket_lengths, int64_t world_size) {
  std::vector<int64_t> rows;
  for (size_t b = 0; b < bucket_lengths.size(); ++b) {
    const auto bucket = static_cast<int64_t>(b);
    rows.insert(rows.end(), {bucket, 0, bucket_lengths[b], bucket % world_size});
  }
  return rows;
}

// Splits each bucket into runs of parameters, smallest bucket first. Each run goes to the rank with
// the least load that has no run of this bucket yet, as in
// ZeroRedundancyOptimizer._bucket_assignments_per_rank, and ends before the parameter that brings
// it to the threshold, an equal share of all elements. As in Python, the share is a quotient of
// doubles, and an equal size (>=) ends a run. The last rank without a run takes the rest of the
// bucket; torch's function fails there.
std::vector<int64_t> sharded_buckets(at::IntArrayRef numels, at::IntArrayRef bucket_lengths,
                                     int64_t world_size) {
  std::vector<at::IntArrayRef> buckets;  // the sizes of each bucket's parameters
  std::vector<int64_t> sizes;            // of each bucket, in elements
  for (const int64_t length : bucket_lengths) {
    buckets.push_back(numels.slice(0, static_cast<size_t>(length)));
    numels = numels.slice(static_cast<size_t>(length));
    sizes.push_back(c10::sum_integers(buckets.back()));
  }
  std::vector<size_t> order(buckets.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] < sizes[b]; });
  const double threshold =
      static_cast<double>(c10::sum_integers(sizes)) / static_cast<double>(world_size);

  std::vector<int64_t> loads(static_cast<size_t>(world_size), 0);
  std::vector<int64_t> rows;
  for (const size_t b : order) {
    std::vector<size_t> unused(loads.size());  // ranks without a run of this bucket, ascending
    std::iota(unused.begin(), unused.end(), size_t{0});
    size_t first = 0;  // first parameter of the run
    int64_t size = 0;  // its elements
    const auto assign = [&](size_t end) {
      const auto rank = std::min_element(unused.begin(), unused.end(),
                                         [&](size_t x, size_t y) { return loads[x] < loads[y]; });
      for (const size_t number : {b, first, end - first, *rank}) {
        rows.push_back(static_cast<int64_t>(number));
      }
      loads[*rank] += size;
      unused.erase(rank);
      first = end;
      size = 0;
    };
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      const int64_t numel = buckets[b][i];
      if (static_cast<double>(size + numel) >= threshold && i > first && unused.size() > 1) {
        assign(i);
      }
      size += numel;
    }
    assign(buckets[b].size());
  }
  return rows;
}

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
  return shard_buckets ? sharded_buckets(numels, bucket_lengths, world_size)
                       : whole_buckets(bucket_lengths, world_size);
}

const Operator kPartitionBuckets(
    "partition_buckets",
    "(int[] numels, int[] bucket_lengths, int world_size, bool shard_buckets) -> int[]",
    partition_buckets_op);

}  // namespace
}  // namespace torchopt_ext

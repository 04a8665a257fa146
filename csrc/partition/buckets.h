// Bucket plan: which rank steps which parameters of DistributedDataParallel's gradient buckets when
// the step overlaps with the backward pass. A pure function of sizes and world size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace torchopt_ext {

// Assigns whole buckets to ranks in turn: ZeroRedundancyOptimizer._get_assigned_rank. Returns rows
// of four numbers: bucket, first parameter, number of parameters and rank.
inline std::vector<int64_t> partition_whole_buckets(const std::vector<int64_t>& bucket_lengths,
                                                    int64_t world_size) {
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
// doubles, and an equal size (>=) ends a run. `numels` are the parameters' sizes, bucket by bucket.
// The last rank without a run takes the rest of the bucket; torch's function fails there.
inline std::vector<int64_t> partition_sharded_buckets(const std::vector<int64_t>& numels,
                                                      const std::vector<int64_t>& bucket_lengths,
                                                      int64_t world_size) {
  std::vector<int64_t> begins;  // the start of each bucket in `numels`
  std::vector<int64_t> sizes;   // of each bucket, in elements
  auto begin = numels.begin();
  for (const int64_t length : bucket_lengths) {
    begins.push_back(begin - numels.begin());
    sizes.push_back(std::accumulate(begin, begin + length, int64_t{0}));
    begin += length;
  }
  std::vector<size_t> order(bucket_lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] < sizes[b]; });
  const auto total = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  const double threshold = total / static_cast<double>(world_size);

  std::vector<int64_t> loads(static_cast<size_t>(world_size), 0);
  std::vector<int64_t> rows;
  for (const size_t b : order) {
    std::vector<bool> used(loads.size(), false);
    int64_t offset = 0;
    int64_t size = 0;
    int64_t unused = world_size;  // ranks without a run of this bucket
    const auto assign = [&](int64_t end) {
      size_t least = loads.size();
      for (size_t rank = 0; rank < loads.size(); ++rank) {
        if (!used[rank] && (least == loads.size() || loads[rank] < loads[least])) {
          least = rank;
        }
      }
      rows.insert(rows.end(),
                  {static_cast<int64_t>(b), offset, end - offset, static_cast<int64_t>(least)});
      used[least] = true;
      --unused;
      loads[least] += size;
      offset = end;
      size = 0;
    };
    for (int64_t i = 0; i < bucket_lengths[b]; ++i) {
      const int64_t numel = numels[static_cast<size_t>(begins[b] + i)];
      if (static_cast<double>(size + numel) >= threshold && i > offset && unused > 1) {
        assign(i);
      }
      size += numel;
    }
    assign(bucket_lengths[b]);
  }
  return rows;
}

}  // namespace torchopt_ext

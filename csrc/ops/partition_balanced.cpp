// Balanced partition: lays tensors one after the other into buckets and cuts each bucket into one
// interval per rank, of about equal lengths. A pure function of sizes and world size.
//
// Cuts respect the blocks of the sum of squares (docs/numerics.md section 3), so that ranks' block
// sums are the same as for whole tensors. Each cut is the possible cut nearest to an equal share,
// so it is at most half a block from there, and lengths differ by at most two blocks.
#include <torchopt_ext/partition.h>

#include <algorithm>

#include "kernels/block_rule.h"
#include "ops/partition_checks.h"

namespace torchopt_ext {
namespace {

// Returns a partition without cuts. A bucket that has elements ends before the tensor that would
// take it beyond `target` elements. A last bucket shorter than half of `target` joins the previous
// bucket.
BalancedPartition lay_out_buckets(const std::vector<int64_t>& numels, int64_t target,
                                  int64_t alignment) {
  const auto align = [&](int64_t x) { return (x + alignment - 1) / alignment * alignment; };
  BalancedPartition plan;
  std::vector<int64_t>& lengths = plan.lengths;
  for (const int64_t numel : numels) {
    if (lengths.empty() || (lengths.back() > 0 && align(lengths.back()) + numel > target)) {
      lengths.push_back(0);
    }
    const int64_t start = align(lengths.back());
    plan.buckets.push_back(static_cast<int64_t>(lengths.size()) - 1);
    plan.starts.push_back(start);
    lengths.back() = start + numel;
  }
  if (lengths.size() > 1 && 2 * lengths.back() < target) {
    const auto last = static_cast<int64_t>(lengths.size()) - 1;
    const int64_t shift = align(lengths[lengths.size() - 2]);
    for (size_t i = numels.size(); i-- > 0 && plan.buckets[i] == last;) {
      plan.buckets[i] -= 1;
      plan.starts[i] += shift;
    }
    const int64_t length = shift + lengths.back();
    lengths.pop_back();
    lengths.back() = length;
  }
  return plan;
}

// Returns the last block of a row that may be a rank's first. A shorter rest would be a short row,
// which the block rule sums element by element.
int64_t last_block(int64_t row_length) { return (row_length - kShortRow) / kBlockElements; }

// Returns the possible cut nearest to a position of a tensor and its padding. All are counted from
// the tensor's start; the next tensor starts at `end`. A tensor may be cut at the block boundaries
// of the sum of squares, or at multiples of `alignment` if rows are short.
int64_t nearest_cut(int64_t position, int64_t numel, int64_t row_length, int64_t alignment,
                    int64_t end) {
  const int64_t offset = std::min(position, numel - 1);  // padding belongs to the last range
  int64_t before = offset / alignment * alignment;
  int64_t after = before + alignment;
  if (row_length >= kShortRow) {
    const int64_t row = offset / row_length * row_length;
    const int64_t block = std::min((offset - row) / kBlockElements, last_block(row_length));
    before = row + block * kBlockElements;
    after = block < last_block(row_length) ? before + kBlockElements : row + row_length;
  }
  after = after < numel ? after : end;
  return position - before <= after - position ? before : after;
}

}  // namespace

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
  const auto& starts = plan.starts;
  auto first = plan.buckets.begin();
  for (size_t b = 0; b < plan.lengths.size(); ++b) {
    const auto last = std::upper_bound(first, plan.buckets.end(), static_cast<int64_t>(b));
    const auto from = starts.begin() + (first - plan.buckets.begin());
    const auto to = starts.begin() + (last - plan.buckets.begin());
    const int64_t length = plan.lengths[b];
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const int64_t ideal = length / world_size * rank + length % world_size * rank / world_size;
      if (ideal == length) {  // an empty bucket
        plan.cuts.push_back(length);
        continue;
      }
      const auto next = std::upper_bound(from, to, ideal);
      const size_t i = next - starts.begin() - 1;
      const int64_t end = (next != to ? *next : length) - starts[i];
      plan.cuts.push_back(
          starts[i] + nearest_cut(ideal - starts[i], numels[i], row_lengths[i], alignment, end));
    }
    plan.cuts.push_back(length);
    first = last;
  }
  return plan;
}

}  // namespace torchopt_ext

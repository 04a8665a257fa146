// Balanced partition: lays tensors one after the other into buckets and cuts each bucket into one
// interval per rank, of about equal lengths. A pure function of sizes and world size.
//
// Cuts respect the blocks of the sum of squares (docs/numerics.md section 3), so that ranks' block
// sums are the same as for whole tensors. Each cut is the possible cut nearest to an equal share,
// so it is at most half a block from there, and lengths differ by at most two blocks.
#pragma once

#include <torchopt_ext/partition.h>

#include <algorithm>
#include <span>

#include "kernels/block_rule.h"

namespace torchopt_ext {

// Returns a partition without cuts. A bucket that has elements ends before the tensor that would
// take it beyond `target` elements. A last bucket shorter than half of `target` joins the previous
// bucket.
inline BalancedPartition lay_out_buckets(const std::vector<int64_t>& numels, int64_t target,
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

// The places where one bucket may be cut: its end, its tensors' starts, and inside a tensor the
// block boundaries of the sum of squares, or multiples of `alignment` if rows are short. Places are
// computed and not listed, as a bucket has very many.
struct CutPlaces {
  // The start, elements and row length of each of the bucket's tensors. The bucket has `length`
  // elements.
  std::span<const int64_t> starts;
  std::span<const int64_t> numels;
  std::span<const int64_t> row_lengths;
  int64_t length;
  int64_t alignment;

  // Returns the place nearest to a position in [0, length).
  int64_t nearest(int64_t position) const {
    const size_t i = std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
    // The padding after a tensor belongs to its last range.
    const int64_t offset = std::min(position - starts[i], numels[i] - 1);
    const int64_t row_length = row_lengths[i];
    int64_t before = 0;
    int64_t after = 0;
    if (row_length < kShortRow) {
      before = offset / alignment * alignment;
      after = before + alignment;
    } else {
      const int64_t row = offset / row_length * row_length;
      const int64_t block = std::min((offset - row) / kBlockElements, last_block(row_length));
      before = row + block * kBlockElements;
      after = block < last_block(row_length) ? before + kBlockElements : row + row_length;
    }
    before += starts[i];
    after = after < numels[i] ? starts[i] + after : end_of(i);
    return position - before <= after - position ? before : after;
  }

  // Returns the last block of a row that may be a rank's first. A shorter rest would be a short
  // row, which the block rule sums element by element.
  static int64_t last_block(int64_t row_length) {
    return (row_length - kShortRow) / kBlockElements;
  }
  int64_t end_of(size_t i) const { return i + 1 < starts.size() ? starts[i + 1] : length; }
};

// Returns the world_size + 1 cuts of one bucket.
inline std::vector<int64_t> balanced_cuts(const CutPlaces& places, int64_t world_size) {
  const int64_t length = places.length;
  std::vector<int64_t> cuts(static_cast<size_t>(world_size) + 1, length);
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const int64_t ideal = length / world_size * rank + length % world_size * rank / world_size;
    cuts[static_cast<size_t>(rank)] = ideal < length ? places.nearest(ideal) : length;
  }
  return cuts;
}

}  // namespace torchopt_ext

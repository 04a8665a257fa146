// Balanced partition: lays tensors one after the other into buckets and cuts each bucket into one
// interval per rank, of about equal lengths. A pure function of sizes and world size.
//
// Cuts respect the blocks of the sum of squares (docs/numerics.md section 3), so that ranks' block
// sums are the same as for whole tensors. Bárány & Grinberg, "Block partitions of sequences"
// (Israel J. Math. 206, 2015): items in a row can be split into any number of runs whose sums
// differ by at most the largest item. Here an item is the range between two adjacent possible cuts.
#pragma once

#include <torchopt_ext/partition.h>

#include <algorithm>
#include <span>
#include <stdexcept>

#include "kernels/block_rule.h"

namespace torchopt_ext {

// Returns the default bucket size. It makes a collective worthwhile, and the one block (4,096
// elements) by which shares of ranks differ is at most 0.4% of a share.
inline int64_t default_bucket_elements(int64_t world_size) {
  return std::max(int64_t{1} << 23, world_size << 20);
}

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

  // The nearest places at or before a position in [0, length], and at or after it.
  struct Neighbors {
    int64_t before;
    int64_t after;
  };
  Neighbors neighbors_of(int64_t position) const {
    if (position == length) {
      return {length, length};
    }
    const size_t i = std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
    // The padding after a tensor belongs to its last item.
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
    if (before == position) {
      return {before, before};
    }
    return {before, after < numels[i] ? starts[i] + after : end_of(i)};
  }
  int64_t before(int64_t position) const { return neighbors_of(position).before; }
  int64_t after(int64_t position) const { return neighbors_of(position).after; }
  int64_t nearest(int64_t position) const {
    const Neighbors near = neighbors_of(position);
    return position - near.before <= near.after - position ? near.before : near.after;
  }

  // Returns the largest distance between adjacent places.
  int64_t largest_item() const {
    int64_t largest = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t extent = end_of(i) - starts[i];
      int64_t item = alignment;
      if (row_lengths[i] >= kShortRow) {
        const int64_t last = last_block(row_lengths[i]);
        const int64_t tail = row_lengths[i] - last * kBlockElements + extent - numels[i];
        item = last > 0 ? std::max(kBlockElements, tail) : tail;
      }
      largest = std::max(largest, std::min(item, extent));
    }
    return largest;
  }

  // Returns the last block of a row that may be a rank's first. A shorter rest would be a short
  // row, which the block rule sums element by element.
  static int64_t last_block(int64_t row_length) {
    return (row_length - kShortRow) / kBlockElements;
  }
  int64_t end_of(size_t i) const { return i + 1 < starts.size() ? starts[i + 1] : length; }
};

// Returns the world_size + 1 cuts of one bucket.
//
// Let every part have `least` to `most` elements. Cut r can then take exactly the places from
// lows[r] to highs[r]: the places that can follow one place are adjacent, and because `most -
// least` is the largest item, the runs that follow adjacent places leave no gap. So a range [least,
// most] is feasible if the bucket's end is in [lows[world_size], highs[world_size]]. Both ends rise
// with the range: bisection finds a feasible range, which exists by Bárány & Grinberg. From the end
// backwards, each cut is then placed near its ideal place among the remaining places.
inline std::vector<int64_t> balanced_cuts(const CutPlaces& places, int64_t world_size) {
  const int64_t length = places.length;
  const int64_t item = places.largest_item();
  const auto ranks = static_cast<size_t>(world_size);
  std::vector<int64_t> lows(ranks + 1, 0);
  std::vector<int64_t> highs(ranks + 1, 0);
  // Once a part of `least` elements would end beyond the bucket, so would all parts after it.
  const auto find_lows = [&](int64_t least) {
    for (size_t r = 0; r < ranks; ++r) {
      const int64_t low = lows[r] + least;
      lows[r + 1] = low > length ? low : places.after(low);
    }
    return lows[ranks];
  };
  const auto find_highs = [&](int64_t most) {
    for (size_t r = 0; r < ranks; ++r) {
      highs[r + 1] = places.before(std::min(length, highs[r] + most));
    }
    return highs[ranks];
  };

  int64_t bottom = (length + world_size - 1) / world_size;
  int64_t top = length / world_size + item;
  int64_t most = 0;
  int64_t least = 0;
  while (true) {
    if (bottom > top) {
      throw std::logic_error("no cuts are balanced, against Barany and Grinberg's theorem");
    }
    most = bottom + (top - bottom) / 2;
    least = std::max<int64_t>(0, most - item);
    if (find_highs(most) < length) {
      bottom = most + 1;
    } else if (find_lows(least) > length) {
      top = most - 1;
    } else {
      break;
    }
  }

  std::vector<int64_t> cuts(ranks + 1, 0);
  cuts[ranks] = length;
  for (size_t r = ranks - 1; r > 0; --r) {
    const auto rank = static_cast<int64_t>(r);
    const int64_t ideal = length / world_size * rank + length % world_size * rank / world_size;
    const int64_t first = std::max(lows[r], places.after(std::max<int64_t>(0, cuts[r + 1] - most)));
    const int64_t last = std::min(highs[r], places.before(cuts[r + 1] - least));
    cuts[r] = std::clamp(places.nearest(ideal), first, last);
  }
  return cuts;
}

}  // namespace torchopt_ext

// Tests shares of small buckets, and greedy loads up to the largest int64_t, also for the
// sanitizers. The Python tests cover the contracts.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torchopt_ext/partition.h>

#include <limits>

#include "kernels/block_rule.h"

namespace torchopt_ext {
namespace {

const int64_t kLengthsOfRows[] = {1, 63, 64, 4095, 4096, 4097, 4160, 9000};
const int64_t kCountsOfRows[] = {0, 1, 3, 70};
const int64_t kWorldSizes[] = {1, 2, 3, 8, 50};

TEST(PartitionBalanced, SharesDifferByTwoBlocksAtMost) {
  for (const int64_t first : kLengthsOfRows) {
    for (const int64_t second : kLengthsOfRows) {
      for (const int64_t rows : kCountsOfRows) {
        const std::vector<int64_t> row_lengths{first, second, first};
        const std::vector<int64_t> numels{rows * first, second, first};
        for (const int64_t world_size : kWorldSizes) {
          const BalancedPartition plan = partition_balanced(numels, row_lengths, world_size);
          const std::vector<int64_t>& cuts = plan.cuts;
          ASSERT_EQ(plan.lengths.size(), 1);
          ASSERT_EQ(cuts.size(), world_size + 1);
          EXPECT_EQ(cuts.front(), 0);
          EXPECT_EQ(cuts.back(), plan.lengths[0]);
          int64_t least = plan.lengths[0];
          int64_t most = 0;
          for (size_t r = 1; r < cuts.size(); ++r) {
            least = std::min(least, cuts[r] - cuts[r - 1]);
            most = std::max(most, cuts[r] - cuts[r - 1]);
          }
          EXPECT_GE(least, 0);
          EXPECT_LE(most - least, 2 * (kBlockElements + 63 + 63));
        }
      }
    }
  }
}

TEST(PartitionGreedy, LoadsReachTheEndOfInt64) {
  using Numbers = std::vector<int64_t>;
  const int64_t most = std::numeric_limits<int64_t>::max();
  const auto partition_greedy =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchopt_ext::partition_greedy", "")
          .typed<Numbers(at::IntArrayRef, int64_t, at::OptionalIntArrayRef,
                         at::OptionalIntArrayRef)>();
  const Numbers loads{most / 2, most / 2};
  EXPECT_EQ(partition_greedy.call({most / 2, 1}, 2, loads, Numbers{1, 0}), (Numbers{1, 0}));
}

}  // namespace
}  // namespace torchopt_ext

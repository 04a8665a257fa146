// Schedules and partitions from C++. tests/python/ops tests what they compute.
#include "support.h"

namespace torchopt_ext::test {
namespace {

TEST(LRFactor, IsComputedFromCpp) {
  const LRSchedule schedule{
      .warmup_steps = 2, .stable_steps = 1, .decay_steps = 2, .min_factor = 0.1, .generation = 2};
  const double factors[] = {0.5, 1.0, 1.0, 0.55, 0.1, 0.1};
  for (int64_t step = 0; step < 6; ++step) {
    EXPECT_NEAR(lr_factor(step, schedule), factors[step], 1e-15);
  }
  EXPECT_NE(message_of([] { lr_factor(0, {.decay_type = "cubic"}); }).find("'cubic'"),
            std::string::npos);
}

TEST(Partition, IsPlannedFromCpp) {
  EXPECT_EQ(partition_greedy({5, 9, 4, 1}, 2), (std::vector<int64_t>{1, 0, 1, 0}));
  const BalancedPartition plan = partition_balanced({1 << 20, 300}, {1 << 10, 300}, 4);
  EXPECT_EQ(plan.buckets, (std::vector<int64_t>{0, 0}));
  ASSERT_EQ(plan.cuts.size(), 5);
  EXPECT_EQ(plan.cuts[0], 0);
  EXPECT_EQ(plan.cuts[4], plan.lengths[0]);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_NEAR(static_cast<double>(plan.cuts[rank + 1] - plan.cuts[rank]), (1 << 18) + 75, 4096);
  }
  EXPECT_NE(message_of([] { partition_greedy({1}, 0); }).find("world_size"), std::string::npos);
}

}  // namespace
}  // namespace torchopt_ext::test

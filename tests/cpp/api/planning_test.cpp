// Schedules and partitions from C++. tests/python/ops tests what they compute.
#include "support.h"

namespace torchopt_ext::test {
namespace {

TEST(ScheduledLR, SetsTheRatesOfTheNextStep) {
  const LRSchedule schedule{
      .warmup_steps = 2, .stable_steps = 1, .decay_steps = 2, .min_factor = 0.1, .generation = 2};
  const double factors[] = {0.5, 1.0, 1.0, 0.55, 0.1, 0.1};
  const Tensors params = some_params();
  FusedAdamW optimizer(params, FusedAdamWOptions(2.0));
  ScheduledLR scheduled(optimizer, schedule);
  for (int64_t step = 0; step < 6; ++step) {
    EXPECT_NEAR(lr_factor(step, schedule), factors[step], 1e-15);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 2.0 * lr_factor(step, schedule));
    FusedAdamW later(params, FusedAdamWOptions(2.0));
    const ScheduledLR resumed(later, schedule, step);
    EXPECT_EQ(later.param_groups()[0].options().get_lr(), 2.0 * lr_factor(step, schedule));
    scheduled.step();
  }
  EXPECT_NE(message_of([] { lr_factor(0, {.decay_type = "cubic"}); }).find("'cubic'"),
            std::string::npos);
}

TEST(ScheduledLR, TakesGroupsThatAreAdded) {
  const Tensors params = some_params();
  FusedAdamW optimizer(Tensors{params[0]}, FusedAdamWOptions(1.0));
  ScheduledLR scheduled(optimizer, {.warmup_steps = 4, .decay_steps = 100});
  const auto lr = [&](size_t g) { return optimizer.param_groups()[g].options().get_lr(); };
  scheduled.step();
  optimizer.add_param_group(
      {Tensors{params[1]}, std::make_unique<FusedAdamWOptions>(FusedAdamWOptions(10.0))});
  scheduled.add_groups();
  EXPECT_EQ(lr(0), 0.4);
  EXPECT_EQ(lr(1), 4.0);
  scheduled.step();
  EXPECT_EQ(lr(0), 0.6);
  EXPECT_EQ(lr(1), 6.0);
}

TEST(ScheduledLR, RefusesWhatItCannotFollow) {
  FusedAdamW optimizer(some_params());
  const auto raised = [&](const LRSchedule& schedule, int64_t steps_made) {
    return message_of([&] { const ScheduledLR scheduled(optimizer, schedule, steps_made); });
  };
  EXPECT_NE(raised({.warmup_steps = 3}, 0).find("decay_steps is 0"), std::string::npos);
  EXPECT_EQ(raised({.warmup_steps = 3, .generation = 2}, 0), "nothing was raised");
  for (const int64_t steps : {int64_t{-1}, int64_t{1} << 32}) {
    EXPECT_NE(raised({.decay_steps = 3}, steps).find("steps_made is "), std::string::npos);
  }
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

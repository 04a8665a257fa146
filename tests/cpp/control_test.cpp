// Tests the control block: loss scales by the rules of torch.amp, Megatron, DeepSpeed and apex, and
// the schedule. tests/python/test_golden.py tests norm, clipping and skipping.
#include "kernels/control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/control.h"
#include "host_cta.h"

namespace torchopt_ext {
namespace {

Control scaler(double scale, double interval, double hysteresis) {
  Control control{};
  control.loss_scale = scale;
  control.growth_factor = 2.0;
  control.backoff_factor = 0.5;
  control.growth_interval = interval;
  control.hysteresis = hysteresis;
  control.lr_factor = 1.0;
  return control;
}

// Returns the scale after each step of `steps`: 'g' is a good step, 'o' an overflow.
std::vector<double> scales(Control control, const std::string& steps) {
  std::vector<double> all;
  for (const char step : steps) {
    loss_scale_update(control, step == 'o');
    all.push_back(control.loss_scale);
  }
  return all;
}

using Scales = std::vector<double>;

// torch.amp: every overflow backs off, and every `interval` good steps in a row grow the scale.
TEST(LossScale, WithHysteresisOneIsTorchs) {
  EXPECT_EQ(scales(scaler(8, 2, 1), "gggoggog"), (Scales{8, 16, 16, 8, 8, 16, 8, 8}));
  EXPECT_EQ(scales(scaler(8, 2, 0), "oo"), (Scales{4, 2}));  // 0 means 1
}

// Megatron, DeepSpeed: overflows use up the hysteresis, each further overflow backs off, and only
// growth resets the count.
TEST(LossScale, WithHysteresisTwoTheSecondOverflowBacksOff) {
  EXPECT_EQ(scales(scaler(8, 3, 2), "ooo"), (Scales{8, 4, 2}));
  EXPECT_EQ(scales(scaler(8, 3, 2), "oggo"), (Scales{8, 8, 8, 4}));
  EXPECT_EQ(scales(scaler(8, 3, 2), "ogggoo"), (Scales{8, 8, 8, 16, 16, 8}));
}

TEST(LossScale, StaysANormalNumberOfFloat) {
  EXPECT_EQ(scales(scaler(0x1p-125, 1, 1), "ooog"),
            (Scales{0x1p-126, 0x1p-126, 0x1p-126, 0x1p-125}));
}

TEST(LossScale, StaysWithinItsBounds) {
  Control control = scaler(8, 1, 1);
  control.min_scale = 3.0;
  control.max_scale = 20.0;
  EXPECT_EQ(scales(control, "ggg"), (Scales{16, 20, 20}));
  EXPECT_EQ(scales(control, "ooo"), (Scales{4, 3, 3}));
}

TEST(LossScale, NeverGrowsToInfinity) {
  EXPECT_EQ(scales(scaler(0x1p126, 1, 1), "ggg"), (Scales{0x1p127, 0x1p127, 0x1p127}));
}

TEST(LossScale, IsAFloat) {
  Control control = scaler(1, 1, 1);
  control.growth_factor = 1.1;
  EXPECT_EQ(scales(control, "g"), (Scales{static_cast<double>(1.1f)}));
}

void step(Control& control, double square, const float* grad_scale, const float* found_inf) {
  control_update(control, square, grad_scale, found_inf);
}

TEST(Control, TheBlocksOwnScaleUnscalesAndFollowsOverflows) {
  Control control = scaler(8, 2, 1);
  control.skip_nonfinite = 1.0;
  step(control, 64.0, nullptr, nullptr);
  EXPECT_EQ(control.grad_norm, 1.0);
  EXPECT_EQ(control.grad_factor, 0.125);
  step(control, 64.0, nullptr, nullptr);
  EXPECT_EQ(control.grad_scale, 8.0);   // the scale of these gradients
  EXPECT_EQ(control.loss_scale, 16.0);  // the scale of the next gradients
  step(control, bit_cast<double>(uint64_t{0x7ff0000000000000}), nullptr, nullptr);
  EXPECT_EQ(control.skip, 1.0);
  EXPECT_EQ(control.loss_scale, 8.0);
  EXPECT_EQ(control.skipped_steps, 1.0);
}

TEST(Control, AScalersTensorsLeaveTheBlocksScaleAlone) {
  Control control = scaler(8, 1, 1);
  const float scale = 4.0f;
  const float found = 1.0f;
  step(control, 16.0, &scale, &found);
  EXPECT_EQ(control.grad_norm, 1.0);
  EXPECT_EQ(control.skip, 1.0);
  EXPECT_EQ(control.loss_scale, 8.0);
}

TEST(Control, AScaleThatCannotUnscaleSkipsTheStep) {
  for (const float scale :
       {0.0f, -0.0f, 1e-40f, -1e-40f, std::numeric_limits<float>::quiet_NaN()}) {
    Control control = scaler(8, 2, 1);
    control_update(control, 1.0, &scale, nullptr);
    EXPECT_EQ(control.skip, 1.0) << scale;
    EXPECT_EQ(control.found_inf, 1.0) << scale;
  }
}

TEST(Control, AWarpDecidesAsTheCpuDoes) {
  Control expected = scaler(8, 2, 1);
  expected.max_grad_norm = 1.0;
  Control actual = expected;
  const float scale = 4.0f;
  for (const double square : {64.0, 0x1p-1000, 1e300, 0.0}) {
    ExactAccumulator accumulator{};
    accumulator_add(accumulator, square);
    for (const float* grad_scale : {static_cast<const float*>(nullptr), &scale}) {
      control_update(expected, square, grad_scale, nullptr);
      const auto* digits = reinterpret_cast<const int64_t*>(&accumulator);
      run_on_host(ControlUpdateKernel{{}, &actual, digits, grad_scale, nullptr}, 1);
      const auto* fields = reinterpret_cast<const uint64_t*>(&expected);
      ASSERT_TRUE(std::equal(fields, fields + kControlSize, reinterpret_cast<uint64_t*>(&actual)));
    }
  }
}

TEST(Control, TheScheduleCountsStepsThatWereMade) {
  Control control = scaler(1, 0, 1);
  control.skip_nonfinite = 1.0;
  control.scheduled = 1.0;
  control.warmup_steps = 4.0;
  control.decay_steps = 2.0;
  control.schedule_generation = 2.0;
  std::vector<double> factors;
  for (const double square :
       {1.0, bit_cast<double>(uint64_t{0x7ff0000000000000}), 1.0, 1.0, 1.0, 1.0, 1.0}) {
    step(control, square, nullptr, nullptr);
    factors.push_back(control.lr_factor);
  }
  EXPECT_EQ(factors, (Scales{0.25, 0.5, 0.5, 0.75, 1.0, 0.5, 0.0}));
  control.scheduled = 0.0;
  control.lr_factor = 0.3;
  step(control, 1.0, nullptr, nullptr);
  EXPECT_EQ(control.lr_factor, 0.3);
}

TEST(Control, CountsOfStepsAreClampedTo0And2To53) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double low : {-kInfinity, -1.0, -0.0, 0.5, std::nan("")}) {
    EXPECT_EQ(bounded_steps(low), 0);
  }
  for (const double high : {0x1p53, 0x1p63, kInfinity}) {
    EXPECT_EQ(bounded_steps(high), kMostSteps);
  }
  // Integers, which are converted to doubles.
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  for (const int64_t exact : {int64_t{0}, int64_t{1}, kMostSteps - 1, kMostSteps}) {
    EXPECT_EQ(bounded_steps(exact), exact);
  }
  for (const int64_t above : {kMostSteps + 1, kMostSteps + 2, kMostSteps + 3, kLargest}) {
    EXPECT_EQ(bounded_steps(above), kMostSteps);
  }
  for (const int64_t below : {int64_t{-1}, -kMostSteps - 1, -kLargest - 1}) {
    EXPECT_EQ(bounded_steps(below), 0);
  }
}

}  // namespace
}  // namespace torchopt_ext

// Compares the accumulator with sums that are known exactly, and a CUDA warp's work on it with the
// CPU's. tests/python/ops compares the accumulator with Python's fractions.
#include "kernels/exact_accumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/control.h"
#include "host_cta.h"

namespace torchopt_ext {
namespace {

double total_of(const std::vector<double>& values) {
  ExactAccumulator acc{};
  for (const double x : values) {
    accumulator_add(acc, x);
  }
  return accumulator_total(acc);
}

TEST(ExactAccumulator, OneValueComesBack) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; ++i) {
    const double x = bit_cast<double>(static_cast<uint64_t>(random()));
    if (std::isfinite(x)) {
      ASSERT_EQ(bit_cast<uint64_t>(total_of({x})), bit_cast<uint64_t>(x == 0.0 ? 0.0 : x));
    }
  }
}

TEST(ExactAccumulator, CancelsExactly) {
  EXPECT_EQ(total_of({1e300, 1.0, -1e300}), 1.0);
  EXPECT_EQ(total_of({1e300, 5e-324, -1e300}), 5e-324);
  EXPECT_EQ(total_of({-1e300, 1.0, 1e300, -1.0}), 0.0);
}

TEST(ExactAccumulator, RoundsOnceToNearestEven) {
  const double half_ulp = 0x1p-53;
  EXPECT_EQ(total_of({1.0, half_ulp}), 1.0);  // a tie, to even
  EXPECT_EQ(total_of({1.0 + 0x1p-52, half_ulp}), 1.0 + 0x1p-51);
  EXPECT_EQ(total_of({1.0, half_ulp, 5e-324}), 1.0 + 0x1p-52);  // just above the tie
  EXPECT_EQ(total_of({1.0, half_ulp, -5e-324}), 1.0);
  EXPECT_EQ(total_of({-1.0, -half_ulp, -5e-324}), -1.0 - 0x1p-52);
}

TEST(ExactAccumulator, OverflowsToInfinityOnlyInTheEnd) {
  const double huge = std::numeric_limits<double>::max();
  EXPECT_EQ(total_of({huge, huge, -huge}), huge);
  EXPECT_TRUE(std::isinf(total_of({huge, huge})));
  EXPECT_EQ(total_of({-huge, -huge}), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isinf(total_of(std::vector<double>(1000000, huge))));
}

TEST(ExactAccumulator, NonFiniteAddendsAreCounted) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isinf(total_of({1.0, infinity})));
  EXPECT_TRUE(std::isnan(total_of({infinity, nan})));
  ExactAccumulator acc{};
  accumulator_add(acc, infinity);
  accumulator_add(acc, -infinity);
  accumulator_add(acc, nan);
  EXPECT_EQ(acc.limb[ExactAccumulator::kInfinities], 2);
  EXPECT_EQ(acc.limb[ExactAccumulator::kNans], 1);
}

TEST(ExactAccumulator, OrderAndGroupingDoNotShow) {
  std::mt19937_64 random(2);
  std::vector<double> values;
  values.reserve(5000);
  for (int i = 0; i < 5000; ++i) {
    values.push_back(std::ldexp(std::normal_distribution<double>()(random),
                                static_cast<int>(random() % 600) - 300));
  }
  const double expected = total_of(values);
  for (int round = 0; round < 10; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    ExactAccumulator merged{};
    for (size_t begin = 0; begin < values.size();) {
      const size_t end = std::min(values.size(), begin + 1 + random() % 900);
      ExactAccumulator part{};
      for (; begin < end; ++begin) {
        accumulator_add(part, values[begin]);
      }
      accumulator_normalize(part);
      accumulator_merge(merged, part);
    }
    ASSERT_EQ(accumulator_total(merged), expected);
  }
}

TEST(ExactAccumulator, NormalisedLimbsAreDigits) {
  ExactAccumulator acc{};
  for (const double x : {-1.0, 3.0, -1e-300, 1e200}) {
    accumulator_add(acc, x);
  }
  accumulator_normalize(acc);
  for (int k = 0; k < ExactAccumulator::kLimbs - 1; ++k) {
    ASSERT_GE(acc.limb[k], 0);
    ASSERT_LT(acc.limb[k], int64_t{1} << 32);
  }
}

// Returns accumulators whose limbs carry and borrow far, cancel, overflow and round at ties.
std::vector<ExactAccumulator> adversaries() {
  constexpr int64_t kDigits = 0xffffffff;
  constexpr int64_t kLastBit = int64_t{1} << 14;  // in limb 0: 2**-1074, the unit of all doubles
  const int64_t values[] = {0,
                            0,
                            1,
                            -1,
                            kDigits,
                            -kDigits,
                            kDigits,
                            kDigits,
                            -kDigits,
                            0x80000000,
                            int64_t{1} << 32,
                            -(int64_t{1} << 32),
                            int64_t{1} << 61,
                            -(int64_t{1} << 61)};
  std::mt19937_64 random(5);
  std::vector<ExactAccumulator> all(2);
  std::fill(all[0].limb, all[0].limb + ExactAccumulator::kLimbs - 1, kDigits);  // one carry ripples
  all[0].limb[0] += 1;
  all[1].limb[0] = -kLastBit;  // one borrow ripples
  for (int i = 0; i < 20000; ++i) {
    ExactAccumulator acc{};
    const auto first = static_cast<int>(random() % ExactAccumulator::kLimbs);
    const auto last =
        std::min<int>(ExactAccumulator::kLimbs, first + 1 + static_cast<int>(random() % 70));
    const bool few = i % 2 == 0;  // different values: long runs of one value
    const int64_t run = values[random() % std::size(values)];
    for (int k = first; k < last; ++k) {
      acc.limb[k] = few && random() % 8 != 0 ? run : values[random() % std::size(values)];
    }
    acc.limb[0] &= -kLastBit;
    if (i % 16 == 1) {
      acc.limb[ExactAccumulator::kInfinities] = static_cast<int64_t>(random() % 3);
      acc.limb[ExactAccumulator::kNans] = static_cast<int64_t>(random() % 2);
    }
    all.push_back(acc);
  }
  for (int i = 0; i < 20000; ++i) {  // ties and their neighbors
    ExactAccumulator acc{};
    const double x = std::ldexp(1.0 + static_cast<double>(random() % 4) * 0x1p-52,
                                static_cast<int>(random() % 2000) - 1000);
    for (const double y : {x, x * 0x1p-53, std::ldexp(x, -54 - static_cast<int>(random() % 80))}) {
      accumulator_add(acc, random() % 2 == 0 ? y : -y);
    }
    all.push_back(acc);
  }
  return all;
}

TEST(ExactAccumulator, AWarpGivesTheCpusDigitsAndTotal) {
  for (const ExactAccumulator& start : adversaries()) {
    ExactAccumulator expected = start;
    accumulator_normalize(expected);
    ExactAccumulator actual = start;
    run_on_host(NormalizeKernel{{}, reinterpret_cast<int64_t*>(&actual)}, 1);
    ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0);
    double total = 0.0;
    run_on_host(TotalKernel{{}, reinterpret_cast<const int64_t*>(&start), &total}, 1);
    ASSERT_EQ(bit_cast<uint64_t>(total), bit_cast<uint64_t>(accumulator_total(start)));
  }
}

}  // namespace
}  // namespace torchopt_ext

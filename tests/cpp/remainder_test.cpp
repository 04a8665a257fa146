// A float as a bf16 weight and an int16 remainder: all lower halves of the upper halves that can
// make a difference.
#include "kernels/remainder.h"

#include <gtest/gtest.h>

#include <vector>

#include "support.h"

namespace torchopt_ext {
namespace {

// Both parities and signs around every exponent: zero, denormals, the largest finite numbers and
// infinity among them.
std::vector<uint32_t> upper_halves() {
  std::vector<uint32_t> halves;
  for (const uint32_t sign : {0x0000u, 0x8000u}) {
    for (uint32_t exponent = 0; exponent < 0xff; ++exponent) {
      for (const uint32_t mantissa : {0x00u, 0x01u, 0x7eu, 0x7fu}) {
        halves.push_back(sign | exponent << 7 | mantissa);
      }
    }
  }
  return halves;
}

bool is_tie(uint32_t bits) { return (bits & 0xffffu) == 0x8000u; }

TEST(Remainder, KeepsEveryFloatButTheTiesAboveEvenWeights) {
  int64_t moved = 0;
  for (const uint32_t upper : upper_halves()) {
    for (uint32_t lower = 0; lower < 0x10000u; ++lower) {
      const uint32_t bits = upper << 16 | lower;
      const auto x = bit_cast<float>(bits);
      const SplitFloat parts = split(x);
      const float joined = join(parts.weight, parts.remainder);
      const auto joined_bits = bit_cast<uint32_t>(joined);
      const bool moves = is_tie(bits) && upper % 2 == 0;
      moved += moves ? 1 : 0;
      ASSERT_EQ(joined_bits, moves ? bits - 1 : bits) << bits;  // towards the even weight below
      ASSERT_EQ(narrow<BFloat16>(joined).bits, parts.weight.bits) << bits;
      ASSERT_EQ(narrow<BFloat16>(x).bits, parts.weight.bits) << bits;
      const SplitFloat again = split(joined);
      ASSERT_EQ(again.weight.bits, parts.weight.bits) << bits;
      ASSERT_EQ(again.remainder, parts.remainder) << bits;
    }
  }
  EXPECT_EQ(moved, static_cast<int64_t>(upper_halves().size() / 2));
}

TEST(Remainder, KeepsInfinityAndNaN) {
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
    const SplitFloat parts = split(bit_cast<float>(bits));
    EXPECT_EQ(bit_cast<uint32_t>(join(parts.weight, parts.remainder)), bits);
    EXPECT_EQ(parts.weight.bits, bits >> 16);
    EXPECT_EQ(parts.remainder, 0);
  }
}

constexpr Layout kLayout{.param = DType::kBFloat16, .master = Master::kRemainder};

// What a kernel takes weights for, but for the sign of a zero: less themselves they are 0, and so
// their change is what they were, negated.
std::vector<float> joined_by(const KernelTable& table, std::vector<BFloat16> weights,
                             std::vector<int16_t> remainders) {
  TensorScalars scalars{};
  scalars.as_float.has_decay = true;
  scalars.as_float.decay = 1.0f;
  scalars.as_float.eps_hat = 1.0f;
  const size_t n = weights.size();
  std::vector<float> grad(n);
  std::vector<float> exp_avg(n);
  std::vector<float> exp_avg_sq(n);
  std::vector<float> change(n);
  TensorWork work = work_of(kLayout, weights.data(), remainders.data());
  work.memory[kGrad] = grad.data();
  work.memory[kExpAvg] = exp_avg.data();
  work.memory[kExpAvgSq] = exp_avg_sq.data();
  ChunkTrace trace{};
  table.adam_traced[6](scalars, work, {}, 0, static_cast<int64_t>(n), change.data(), trace);
  for (float& x : change) {
    x = -x;
  }
  return change;
}

// Ties above even weights come about as the float above them minus one unit.
TEST(Remainder, KernelsSplitAndJoinAsTheHeaderDoes) {
  std::vector<float> values;
  std::vector<float> amounts;
  std::vector<BFloat16> before;
  std::vector<int16_t> before_remainder;
  for (const uint32_t upper : upper_halves()) {
    for (const uint32_t lower : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = upper << 16 | lower;
      const auto above = bit_cast<float>(bits + (is_tie(bits) ? 1 : 0));
      values.push_back(bit_cast<float>(bits));
      amounts.push_back(above - values.back());
      before.push_back(split(above).weight);
      before_remainder.push_back(split(above).remainder);
    }
  }
  const std::vector<float> nothing(values.size());
  for (const KernelTable* table : runnable_tables()) {
    std::vector<BFloat16> weights = before;
    std::vector<int16_t> remainders = before_remainder;
    const TensorWork work = work_of(kLayout, weights.data(), remainders.data());
    subtract(*table, work, amounts);
    for (int stored = 1; stored <= 2; ++stored) {  // the second is the first, joined and split
      for (size_t i = 0; i < values.size(); ++i) {
        const SplitFloat parts = split(values[i]);
        ASSERT_EQ(weights[i].bits, parts.weight.bits) << table->name << " " << values[i];
        ASSERT_EQ(remainders[i], parts.remainder) << table->name << " " << values[i];
      }
      subtract(*table, work, nothing);
    }
    const std::vector<float> joined = joined_by(*table, weights, remainders);
    for (size_t i = 0; i < values.size(); ++i) {
      const float expected = join(weights[i], remainders[i]);
      if (expected != 0.0f) {  // the sign of a zero has been split again above
        ASSERT_EQ(bit_cast<uint32_t>(joined[i]), bit_cast<uint32_t>(expected)) << table->name;
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

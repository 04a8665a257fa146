// Tests a float as a bf16 weight and an int16 or int8 remainder, with all lower halves of the upper
// halves that can make a difference.
#include "kernels/remainder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support.h"

namespace torchopt_ext {
namespace {

// Returns upper halves of both parities and signs at the ends of exponents: among them zero,
// denormals and the largest finite numbers, which also round to infinity.
std::vector<uint32_t> upper_halves() {
  std::vector<uint32_t> halves;
  for (const uint32_t sign : {0x0000u, 0x8000u}) {
    for (uint32_t exponent = 0; exponent < 0xff; ++exponent) {
      if (exponent > 3 && exponent < 0xfb && exponent % 16 != 15) {
        continue;  // carries are the same in all skipped exponents
      }
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
      const SplitFloat<int16_t> parts = split(x);
      const float joined = join(parts.weight, parts.remainder);
      const auto joined_bits = bit_cast<uint32_t>(joined);
      const bool moves = is_tie(bits) && upper % 2 == 0;
      moved += moves ? 1 : 0;
      ASSERT_EQ(joined_bits, moves ? bits - 1 : bits) << bits;  // towards the even weight below
      ASSERT_EQ(narrow<BFloat16>(joined).bits, parts.weight.bits) << bits;
      ASSERT_EQ(narrow<BFloat16>(x).bits, parts.weight.bits) << bits;
      const SplitFloat<int16_t> again = split(joined);
      ASSERT_EQ(again.weight.bits, parts.weight.bits) << bits;
      ASSERT_EQ(again.remainder, parts.remainder) << bits;
    }
  }
  EXPECT_EQ(moved, static_cast<int64_t>(upper_halves().size() / 2));
}

// The nearest floats that pairs with an int8 can hold; both are the float itself if possible.
struct Pairs {
  uint32_t below;
  uint32_t above;
};

Pairs pairs_around(uint32_t bits) {
  const auto named = [](uint32_t x) { return (x & 0xffu) == 0 && (x & 0x1ffffu) != 0x8000u; };
  Pairs pairs{bits, bits};
  for (; !named(pairs.below); --pairs.below) {
  }
  for (; !named(pairs.above); ++pairs.above) {
  }
  return pairs;
}

uint32_t joined_bits(const SplitFloat<int8_t>& parts) {
  return bit_cast<uint32_t>(join(parts.weight, parts.remainder));
}

// Returns whether x is what the pair stands for and no other pair: a zero's negative remainders do
// not count, and some floats round to another weight.
bool is_stored(BFloat16 weight, int remainder, float x) {
  const bool counts = remainder >= 0 || (weight.bits & 0x7fffu) != 0;
  return counts && !std::isnan(x) && narrow<BFloat16>(x).bits == weight.bits;
}

// The weight is the nearest to the float, and no other remainder of this weight comes nearer.
TEST(Remainder, OfEightBitsComesNearest) {
  for (const uint32_t upper : upper_halves()) {
    for (uint32_t lower = 0; lower < 0x10000u; ++lower) {
      const uint32_t bits = upper << 16 | lower;
      const auto x = bit_cast<float>(bits);
      const SplitFloat<int8_t> parts = split8(x);
      ASSERT_EQ(parts.weight.bits, split(x).weight.bits) << bits;
      const auto distance = [&](int remainder) {
        const float y = join(parts.weight, static_cast<int8_t>(remainder));
        const bool is_pair =
            remainder >= -128 && remainder < 128 && is_stored(parts.weight, remainder, y);
        return is_pair ? std::abs(static_cast<int64_t>(bit_cast<uint32_t>(y)) - bits)
                       : int64_t{1} << 32;
      };
      const int64_t found = distance(parts.remainder);
      ASSERT_LE(found, 0x100) << bits;
      // Of two equally near remainders, the lower is chosen where bit 16 is 0.
      const bool is_odd = upper % 2 == 1;
      ASSERT_TRUE(found < distance(parts.remainder - 1) + is_odd) << bits;
      ASSERT_TRUE(found < distance(parts.remainder + 1) + !is_odd) << bits;
    }
  }
}

TEST(Remainder, OfEightBitsKeepsPairs) {
  for (const uint32_t upper : upper_halves()) {
    for (int remainder = -128; remainder < 128; ++remainder) {
      const BFloat16 weight{static_cast<uint16_t>(upper)};
      const float x = join(weight, static_cast<int8_t>(remainder));
      if (!is_stored(weight, remainder, x)) {
        continue;
      }
      const SplitFloat<int16_t> wider = split(x);
      ASSERT_EQ(wider.weight.bits, upper);
      ASSERT_EQ(wider.remainder, 256 * remainder);
      ASSERT_EQ(joined_bits(split8(x)), bit_cast<uint32_t>(x));
      for (const uint32_t draw : {0u, 0xffu, 0x100u, 0xffffu}) {
        ASSERT_EQ(joined_bits(split8_stochastic(x, draw)), bit_cast<uint32_t>(x));
      }
    }
  }
}

TEST(Remainder, OfEightBitsIsRightOnAverage) {
  for (const uint32_t upper : {0x0000u, 0x3f80u, 0xbf81u, 0x7f7fu}) {
    for (uint32_t lower = 0; lower < 0x10000u; lower += 3) {
      const uint32_t bits = upper << 16 | lower;
      const auto [below, above] = pairs_around(bits);
      uint32_t ups = 0;
      for (uint32_t draw = 0; draw < 0x200u; ++draw) {
        const SplitFloat<int8_t> parts = split8_stochastic(bit_cast<float>(bits), draw);
        const uint32_t found = joined_bits(parts);
        ASSERT_TRUE(found == below || found == above) << bits;
        ASSERT_EQ(narrow<BFloat16>(join(parts.weight, parts.remainder)).bits, parts.weight.bits);
        ups += found == above ? 1 : 0;
      }
      ASSERT_EQ(below == above ? 0 : ups * (above - below), (bits - below) * 0x200u) << bits;
    }
  }
}

TEST(Remainder, KeepsInfinityAndNaN) {
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
    const SplitFloat<int16_t> parts = split(bit_cast<float>(bits));
    EXPECT_EQ(bit_cast<uint32_t>(join(parts.weight, parts.remainder)), bits);
    EXPECT_EQ(joined_bits(split8(bit_cast<float>(bits))), bits);
    EXPECT_EQ(joined_bits(split8_stochastic(bit_cast<float>(bits), 0xffff)), bits);
    EXPECT_EQ(parts.weight.bits, bits >> 16);
    EXPECT_EQ(parts.remainder, 0);
  }
}

SplitFloat<int16_t> split_as(float x, int16_t /*remainder*/) { return split(x); }
SplitFloat<int8_t> split_as(float x, int8_t /*remainder*/) { return split8(x); }

template <class Remainder>
constexpr Layout kLayout{
    .param = DType::kBFloat16,
    .master = sizeof(Remainder) == 1 ? Master::kRemainder8 : Master::kRemainder};

// Returns the floats that a kernel joins from weights and remainders, except for the sign of a
// zero. A decay of 1 makes the floats 0, so that their changes are the negated floats.
template <class Remainder>
std::vector<float> joined_by(const KernelTable& table, std::vector<BFloat16> weights,
                             std::vector<Remainder> remainders) {
  TensorScalars scalars{};
  scalars.as_float.has_decay = true;
  scalars.as_float.decay = 1.0f;
  scalars.as_float.value[Adam::kEpsHat] = 1.0f;
  const size_t n = weights.size();
  std::vector<float> grad(n);
  std::vector<float> exp_avg(n);
  std::vector<float> exp_avg_sq(n);
  std::vector<float> change(n);
  TensorWork work = work_of(kLayout<Remainder>, weights.data(), remainders.data());
  work.memory[kGrad] = grad.data();
  work.memory[kExpAvg] = exp_avg.data();
  work.memory[kExpAvgSq] = exp_avg_sq.data();
  table.update[static_cast<int>(AdamKind::kGeneral)](scalars, work, {}, 0, static_cast<int64_t>(n),
                                                     change.data());
  for (float& x : change) {
    x = -x;
  }
  return change;
}

// Moves the pair nearest to a value to the value, which the kernel then splits again.
template <class Remainder>
void expect_kernels_split_and_join() {
  std::vector<float> values;
  std::vector<float> amounts;
  std::vector<BFloat16> before;
  std::vector<Remainder> before_remainder;
  for (const uint32_t upper : upper_halves()) {
    for (const uint32_t lower : {0x0000u, 0x007fu, 0x0080u, 0x0180u, 0x7f7fu, 0x7f80u, 0x7fffu,
                                 0x8000u, 0x8001u, 0x8080u, 0x8081u, 0xff00u, 0xff7fu}) {
      const auto x = bit_cast<float>(upper << 16 | lower);
      const SplitFloat<Remainder> near = split_as(x, Remainder{});
      values.push_back(x);
      amounts.push_back(join(near.weight, near.remainder) - x);
      before.push_back(near.weight);
      before_remainder.push_back(near.remainder);
    }
  }
  const std::vector<float> nothing(values.size());
  for (const KernelTable* table : runnable_tables()) {
    std::vector<BFloat16> weights = before;
    std::vector<Remainder> remainders = before_remainder;
    const TensorWork work = work_of(kLayout<Remainder>, weights.data(), remainders.data());
    subtract(*table, work, amounts);
    for (int stored = 1; stored <= 2; ++stored) {  // the second time after a join and a split
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(weights[i].bits, before[i].bits) << table->name << " " << values[i];
        ASSERT_EQ(remainders[i], before_remainder[i]) << table->name << " " << values[i];
      }
      subtract(*table, work, nothing);
    }
    const std::vector<float> joined = joined_by(*table, weights, remainders);
    for (size_t i = 0; i < values.size(); ++i) {
      const float expected = join(weights[i], remainders[i]);
      if (expected != 0.0f) {  // the loop above tests the sign of a zero
        ASSERT_EQ(bit_cast<uint32_t>(joined[i]), bit_cast<uint32_t>(expected)) << table->name;
      }
    }
  }
}

template <class Remainder>
void expect_zeros_are_not_nan() {
  std::vector<BFloat16> weights;
  std::vector<Remainder> remainders;
  for (int i = 0; i < 1 << (8 * sizeof(Remainder)); ++i) {  // every value
    for (const uint16_t zero : {0x0000, 0x8000}) {
      weights.push_back({zero});
      remainders.push_back(static_cast<Remainder>(i));
    }
  }
  for (const KernelTable* table : runnable_tables()) {
    const std::vector<float> joined = joined_by(*table, weights, remainders);
    for (size_t i = 0; i < joined.size(); ++i) {
      const int rest = std::max<int>(remainders[i], 0) * (sizeof(Remainder) == 1 ? 256 : 1);
      const auto expected = bit_cast<float>((uint32_t{weights[i].bits} << 16) + rest);
      ASSERT_EQ(joined[i], expected) << table->name << " " << int{remainders[i]};
      ASSERT_EQ(join(weights[i], remainders[i]), expected) << int{remainders[i]};
    }
  }
}

TEST(Remainder, OfAZeroFromOutsideIsNotNegative) {
  expect_zeros_are_not_nan<int16_t>();
  expect_zeros_are_not_nan<int8_t>();
}

TEST(Remainder, KernelsSplitAndJoinAsTheHeaderDoes) {
  expect_kernels_split_and_join<int16_t>();
  expect_kernels_split_and_join<int8_t>();
}

}  // namespace
}  // namespace torchopt_ext

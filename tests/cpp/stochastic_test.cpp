// Philox against Random123's known answers (tests/kat_vectors), and rounding by its draws.
#include "kernels/stochastic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support.h"

namespace torchopt_ext {
namespace {

struct KnownAnswer {
  uint32_t counter[4];
  uint32_t key[2];
  uint32_t word[4];
};

constexpr KnownAnswer kKnownAnswers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};

TEST(Stochastic, PhiloxGivesTheKnownAnswers) {
  for (const KnownAnswer& known : kKnownAnswers) {
    const RoundingKey key{known.key[0] | static_cast<uint64_t>(known.key[1]) << 32,
                          known.counter[2], known.counter[3]};
    const uint64_t index = known.counter[0] | static_cast<uint64_t>(known.counter[1]) << 32;
    const PhiloxBlock block = philox(key, index);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(block.word[i], known.word[i]);
    }
  }
}

TEST(Stochastic, ABlockServesTwoElements) {
  const RoundingKey key{3, 4, 5};
  const PhiloxBlock block = philox(key, 10);
  EXPECT_EQ(random_of(key, 20), block.word[0] | static_cast<uint64_t>(block.word[1]) << 32);
  EXPECT_EQ(random_of(key, 21), block.word[2] | static_cast<uint64_t>(block.word[3]) << 32);
}

TEST(Stochastic, EveryTableDrawsTheSame) {
  const RoundingKey key{0x123456789abcdef0, 0xf0000001, 0x80000002};
  const int64_t carry = (int64_t{1} << 33) - 21;  // a block's number outgrows 32 bits on the way
  for (const KernelTable* table : runnable_tables()) {
    for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, carry, carry + 1}) {
      for (const int64_t n : {0, 1, 2, 3, 50, 67}) {
        std::vector<uint64_t> random(static_cast<size_t>(n) + 1, 0x5555);
        table->random_bits(key, first, random.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(random[static_cast<size_t>(i)],
                    random_of(key, static_cast<uint64_t>(first + i)))
              << table->name << " " << first << " " << i;
        }
        ASSERT_EQ(random.back(), 0x5555u);
      }
    }
  }
}

// Draws below and at the part that is cut off, for each array by itself.
TEST(Stochastic, RoundsToOneOfTheNeighbours) {
  for (uint32_t upper = 0; upper < 0x8000u; ++upper) {
    if (upper >= 0x7f80u) {
      continue;
    }
    const bool largest = upper == 0x7f7fu;
    for (const uint32_t sign : {0x0000u, 0x8000u}) {
      for (const uint32_t lower : {0x0000u, 0x0001u, 0x8000u, 0xffffu}) {
        const auto x = bit_cast<float>((sign | upper) << 16 | lower);
        for (const Array draw : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
          for (const uint32_t random : {0x0000u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu}) {
            const uint64_t bits = static_cast<uint64_t>(random) << (16 * draw);
            const bool up = lower + random >= 0x10000u && !largest;
            ASSERT_EQ(narrow_stochastic(x, bits, draw).bits, (sign | upper) + (up ? 1u : 0u))
                << x << " " << random;
          }
        }
      }
    }
  }
}

TEST(Stochastic, KeepsInfinityAndNaN) {
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
    for (const uint64_t random : {uint64_t{0}, ~uint64_t{0}}) {
      EXPECT_EQ(narrow_stochastic(bit_cast<float>(bits), random, kParam).bits, bits >> 16);
    }
  }
}

TEST(Stochastic, TheMeanIsTheExactValue) {
  constexpr int64_t kDraws = 100000;
  const RoundingKey key{20240601, 17, 3};
  std::vector<uint64_t> random(kDraws);
  default_kernels().random_bits(key, 0, random.data(), kDraws);
  for (const double part : {0.01, 0.25, 0.5, 0.9}) {  // of the distance between neighbours
    const double step = 0x1p-7;
    const auto x = static_cast<float>(1.0 + step * part);
    for (const Array draw : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
      double sum = 0.0;
      for (const uint64_t bits : random) {
        const BFloat16 rounded = narrow_stochastic(x, bits, draw);
        sum += static_cast<double>(widen(rounded)) - static_cast<double>(x);
      }
      const double sigma = step * std::sqrt(part * (1.0 - part) / kDraws);
      EXPECT_LT(std::abs(sum / kDraws), 4.0 * sigma) << part << " draw " << draw;
    }
  }
}

TEST(Stochastic, KernelsRoundAsTheHeaderDoes) {
  constexpr size_t kElements = 1000;
  std::vector<uint64_t> random(kElements);
  default_kernels().random_bits({1, 2, 3}, 0, random.data(), kElements);
  std::vector<BFloat16> before;
  std::vector<float> amounts;
  std::vector<BFloat16> expected;
  for (size_t i = 0; i < kElements; ++i) {
    const auto bits = static_cast<uint32_t>((random[i] * 0x9e3779b97f4a7c15u) >> 32) & 0xbfffffffu;
    const auto x = bit_cast<float>(bits);  // of any sign, below 2 in magnitude
    before.push_back({static_cast<uint16_t>(bits >> 16)});
    amounts.push_back(widen(before.back()) - x);  // exact, and so is the subtraction
    expected.push_back(narrow_stochastic(x, random[i], kParam));
  }
  for (const KernelTable* table : runnable_tables()) {
    std::vector<BFloat16> param = before;
    TensorWork work = work_of({.param = DType::kBFloat16}, param.data());
    float step = 2.0f;
    work.memory[kStep] = &step;
    work.index = 3;
    subtract(*table, work, amounts, {.stochastic_rounding = true, .rounding_seed = 1});
    for (size_t i = 0; i < kElements; ++i) {
      ASSERT_EQ(param[i].bits, expected[i].bits) << table->name << " " << i;
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

// Tests the draws' words and rounding by draws. Golden vectors (tests/golden) pin the draws.
#include "kernels/stochastic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support.h"

namespace torchopt_ext {
namespace {

using Drawn = RandomWords<ScalarWords>;

Drawn random_of(const RoundingKey& key, uint64_t element) {
  return random_words<ScalarWords>(rounding_stream(key, element), static_cast<uint32_t>(element));
}

// Tests draws below and at the part that is cut off, for each array separately.
TEST(Stochastic, RoundsToOneOfTheNeighbours) {
  for (uint32_t upper = 0; upper < 0x8000u; ++upper) {
    if (upper >= 0x7f80u) {
      continue;
    }
    for (const uint32_t sign : {0x0000u, 0x8000u}) {
      for (const uint32_t lower : {0x0000u, 0x0001u, 0x8000u, 0xffffu}) {
        const auto x = bit_cast<float>((sign | upper) << 16 | lower);
        for (const Array draw : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
          for (const uint32_t random : {0x0000u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu}) {
            const Drawn bits{
                {draw < 2 ? random << (16 * draw) : 0, draw < 2 ? 0 : random << (16 * (draw - 2))}};
            const bool up = lower + random >= 0x10000u;
            ASSERT_EQ(narrow_stochastic(x, random_bits_of(bits, draw)).bits,
                      (sign | upper) + (up ? 1u : 0u))
                << x << " " << random;
          }
        }
      }
    }
  }
}

TEST(Stochastic, KeepsInfinityAndNaN) {
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
    for (const uint32_t draw : {0u, 0xffffu}) {
      EXPECT_EQ(narrow_stochastic(bit_cast<float>(bits), draw).bits, bits >> 16);
    }
  }
}

TEST(Stochastic, TheMeanIsTheExactValue) {
  constexpr uint64_t kDraws = 100000;
  const RoundingKey key{20240601, 17, 3};
  for (const double part : {0.01, 0.25, 0.5, 0.9}) {  // fractions of the distance between neighbors
    const double step = 0x1p-7;
    const auto x = static_cast<float>(1.0 + step * part);
    for (const Array draw : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
      double sum = 0.0;
      for (uint64_t i = 0; i < kDraws; ++i) {
        const BFloat16 rounded = narrow_stochastic(x, random_bits_of(random_of(key, i), draw));
        sum += static_cast<double>(widen(rounded)) - static_cast<double>(x);
      }
      const double sigma = step * std::sqrt(part * (1.0 - part) / kDraws);
      EXPECT_LT(std::abs(sum / kDraws), 4.0 * sigma) << part << " draw " << draw;
    }
  }
}

// Tests also elements whose number carries into its upper half, and shards in several runs.
void expect_kernels_round_as_the_header(Master master) {
  constexpr size_t kElements = 1000;
  constexpr int64_t kCarry = (int64_t{1} << 32) - 21;
  const RoundingKey key{0x123456789abcdef0, 0x80000001, 0xf0000002};
  float step = 0x1p24f;
  for (const int64_t first : {int64_t{0}, int64_t{7}, kCarry}) {
    for (const int64_t run : {0, 37}) {
      TensorWork work = work_of({.param = DType::kBFloat16, .master = master}, nullptr);
      work.memory[kStep] = &step;
      work.index = key.parameter;
      work.first_element = first;
      work.run = run;
      work.stride = 100;
      std::vector<BFloat16> before;
      std::vector<float> amounts;
      std::vector<SplitFloat<int8_t>> expected;
      for (size_t i = 0; i < kElements; ++i) {
        const auto element = static_cast<uint64_t>(global_element(work, static_cast<int64_t>(i)));
        const Drawn random =
            random_of({key.seed, static_cast<uint32_t>(step), key.parameter}, element);
        uint32_t bits = (random.word[1] * 0x9e3779b9u) & 0xbfffffffu;
        if (i % 3 == 0) {
          bits = (bits & 0xfffe00ffu) | 0x8000u;  // near the tie above an even weight
        }
        const auto x = bit_cast<float>(bits);  // any sign, below 2 in magnitude
        before.push_back({static_cast<uint16_t>(bits >> 16)});
        amounts.push_back(widen(before.back()) - x);  // exact, and so is the subtraction
        const uint32_t draw = random_bits_of(random, kParam);
        expected.push_back(master == Master::kRemainder8
                               ? split8_stochastic(x, draw)
                               : SplitFloat<int8_t>{narrow_stochastic(x, draw), 0});
      }
      for (const KernelTable* table : runnable_tables()) {
        std::vector<BFloat16> param = before;
        std::vector<int8_t> remainder(kElements);
        work.memory[kParam] = param.data();
        work.memory[kMaster] = remainder.data();
        subtract(*table, work, amounts, {.stochastic_rounding = true, .rounding_seed = key.seed});
        for (size_t i = 0; i < kElements; ++i) {
          ASSERT_EQ(param[i].bits, expected[i].weight.bits)
              << table->name << " " << first << " " << i;
          ASSERT_EQ(remainder[i], expected[i].remainder) << table->name << " " << first << " " << i;
        }
      }
    }
  }
}

TEST(Stochastic, KernelsRoundAsTheHeaderDoes) {
  expect_kernels_round_as_the_header(Master::kNone);
  expect_kernels_round_as_the_header(Master::kRemainder8);
}

}  // namespace
}  // namespace torchopt_ext

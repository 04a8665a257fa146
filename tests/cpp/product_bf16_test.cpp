// Products of bf16 matrices are those of doubles within their rounding, and each element has the
// same bits however the result is cut into blocks.
#include "cpu/product_bf16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "support.h"

namespace torchopt_ext {
namespace {

constexpr int64_t kGap = 32;  // unused elements after each row

struct AlignedRows {
  AlignedRows(int64_t rows, int64_t cols, unsigned seed) : ld(cols + kGap) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    memory.resize(static_cast<size_t>(rows * ld + kGap));
    const auto misplaced = reinterpret_cast<uintptr_t>(memory.data()) % 64 / sizeof(BFloat16);
    x = memory.data() + (kGap - misplaced) % kGap;
    std::generate_n(x, rows * ld, [&] { return narrow<BFloat16>(normal(random)); });
  }
  double at(int64_t i, int64_t j) const { return static_cast<double>(widen(x[i * ld + j])); }

  int64_t ld;
  std::vector<BFloat16> memory;
  BFloat16* x;
};

void compute(const Bf16Kernels& kernels, const Bf16Product& p, int64_t rows, int64_t cols) {
  const auto scratch = std::make_unique<Bf16Scratch>();
  for (int64_t j = 0; j < p.cols; j += cols) {
    const int64_t last_col = std::min(j + cols, p.cols);
    const int64_t last = p.symmetric ? last_col : p.rows;
    for (int64_t i = 0; i < last; i += rows) {
      kernels.product(p, {i, std::min(i + rows, last), j, last_col}, *scratch);
    }
  }
}

std::vector<const Bf16Kernels*> kernels_of_this_cpu() {
  std::vector<const Bf16Kernels*> all;
#ifdef __x86_64__
  for (const bool with_tiles : {true, false}) {
    if (const Bf16Kernels* found = bf16_kernels(with_tiles); found != nullptr) {
      all.push_back(found);
    }
  }
#endif
  return all;
}

class Bf16ProductTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kernels_of_this_cpu().empty()) {
      GTEST_SKIP() << "the CPU has no instructions for products of bf16";
    }
  }
};

struct Bf16Case {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  bool b_transposed;
  bool symmetric;
  int addends;
};

void expect_products(const Bf16Case& c) {
  const AlignedRows a(c.rows, c.depth, 1);
  const AlignedRows other =
      c.b_transposed ? AlignedRows(c.cols, c.depth, 2) : AlignedRows(c.depth, c.cols, 2);
  const AlignedRows& b = c.symmetric ? a : other;
  const AlignedRows before(c.rows, c.cols, 3);
  const std::array<AlignedRows, 2> addends = {AlignedRows(c.rows, c.cols, 4),
                                              AlignedRows(c.rows, c.cols, 5)};
  AlignedRows result(c.rows, c.cols, 3);
  std::vector<float> diagonal(static_cast<size_t>(c.rows));
  Bf16Product p{.a = {a.x, a.ld, false},
                .b = {b.x, b.ld, c.b_transposed},
                .c = result.x,
                .ldc = result.ld,
                .rows = c.rows,
                .cols = c.cols,
                .depth = c.depth,
                .symmetric = c.symmetric,
                .diagonal = c.symmetric ? diagonal.data() : nullptr,
                .alpha = -1.5f};
  for (int n = 0; n < c.addends; ++n) {
    p.addend[n] = addends[static_cast<size_t>(n)].x;
    p.beta[n] = n == 0 ? 0.75f : -2.0f;
  }
  const auto expected = [&](int64_t i, int64_t j) {
    double sum = 0.0;
    for (int64_t k = 0; k < c.depth; ++k) {
      sum += a.at(i, k) * (c.b_transposed ? b.at(j, k) : b.at(k, j));
    }
    sum *= -1.5;
    for (int n = 0; n < c.addends; ++n) {
      sum += static_cast<double>(p.beta[n]) * addends[static_cast<size_t>(n)].at(i, j);
    }
    return sum;
  };
  for (const Bf16Kernels* kernels : kernels_of_this_cpu()) {
    std::vector<BFloat16> first;
    for (const auto& [rows, cols] :
         {std::pair{kBf16BlockRows, kBf16BlockCols}, std::pair{int64_t{64}, kBf16BlockCols},
          std::pair{int64_t{32}, int64_t{32}}}) {
      std::copy(before.x, before.x + c.rows * before.ld, result.x);
      std::fill(diagonal.begin(), diagonal.end(), 0.0f);
      compute(*kernels, p, rows, cols);
      const std::vector<BFloat16> bits(result.x, result.x + c.rows * result.ld);
      first = first.empty() ? bits : first;
      ASSERT_EQ(std::memcmp(bits.data(), first.data(), sizeof(BFloat16) * bits.size()), 0);
    }
    const double tolerance = 1e-5 * std::sqrt(static_cast<double>(c.depth));
    for (int64_t i = 0; i < c.rows; ++i) {
      for (int64_t j = 0; j < c.cols; ++j) {
        const bool mirrored = c.symmetric && j < i;
        const double value = mirrored ? expected(j, i) : expected(i, j);
        ASSERT_NEAR(result.at(i, j), value, std::abs(value) / 250 + tolerance) << i << ", " << j;
        if (mirrored) {
          ASSERT_EQ(result.at(i, j), result.at(j, i));
        }
      }
      if (c.symmetric) {
        const float element = diagonal[static_cast<size_t>(i)];
        const double value = expected(i, i);
        ASSERT_NEAR(element, value, std::abs(value) * 1e-5 + tolerance) << i;
        ASSERT_EQ(widen(narrow<BFloat16>(element)), result.at(i, i)) << i;
      }
      for (int64_t j = c.cols; j < result.ld; ++j) {
        ASSERT_EQ(result.at(i, j), before.at(i, j)) << "wrote past row " << i;
      }
    }
  }
}

TEST_F(Bf16ProductTest, IsTheProduct) {
  for (const bool b_transposed : {false, true}) {
    for (const auto& [rows, cols, depth] : std::vector<std::array<int64_t, 3>>{
             {32, 32, 32}, {96, 160, 64}, {544, 32, 96}, {64, 288, kBf16PanelDepth + 64}}) {
      expect_products({rows, cols, depth, b_transposed, false, static_cast<int>(rows / 32 % 3)});
    }
  }
}

TEST_F(Bf16ProductTest, MirrorsTheUpperHalf) {
  for (const int64_t size : {32, 128, 160, 576}) {
    expect_products({size, size, size == 160 ? kBf16PanelDepth + 32 : 64, true, true, 2});
  }
}

TEST_F(Bf16ProductTest, TransposesTiles) {
  const AlignedRows from(64, 96, 6);
  AlignedRows to(96, 64, 7);
  for (const Bf16Kernels* kernels : kernels_of_this_cpu()) {
    kernels->transpose(from.x, from.ld, 64, 96, to.x, to.ld);
    for (int64_t i = 0; i < 64; ++i) {
      for (int64_t j = 0; j < 96; ++j) {
        ASSERT_EQ(from.at(i, j), to.at(j, i));
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

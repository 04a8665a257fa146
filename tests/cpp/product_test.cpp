// The bitwise contract of matrix products: on every instruction set an element is one chain of
// fused multiply-adds, however the result is cut into blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "support.h"

namespace torchopt_ext {
namespace {

struct ProductCase {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  bool a_transposed;
  bool b_transposed;
  bool has_addend;
};

std::vector<float> random_floats(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) {
    value = normal(random);
  }
  return x;
}

float element_of(const Operand& x, int64_t i, int64_t j) {
  return x.transposed ? x.x[j * x.ld + i] : x.x[i * x.ld + j];
}

float expected_element(const Product& p, int64_t i, int64_t j) {
  using Lane = ScalarLane<float>;
  if (p.symmetric && j < i) {
    std::swap(i, j);
  }
  float sum = 0.0f;
  for (int64_t k = 0; k < p.depth; ++k) {
    sum = Lane::fma(element_of(p.a, i, k), element_of(p.b, k, j), sum);
  }
  if (p.addend != nullptr) {
    sum = Lane::fma(p.alpha, sum, p.beta * p.addend[i * p.ldc + j]);
    sum = i == j ? sum + p.diagonal : sum;
  }
  return sum;
}

// Computes the product in blocks of block_rows x block_cols.
void compute(const KernelTable& table, const Product& p, int64_t block_rows, int64_t block_cols) {
  const auto scratch = std::make_unique<ProductScratch>();
  for (int64_t i = 0; i < p.rows; i += block_rows) {
    for (int64_t j = p.symmetric ? i : 0; j < p.cols; j += block_cols) {
      table.product(p, {i, std::min(i + block_rows, p.rows), j, std::min(j + block_cols, p.cols)},
                    *scratch);
    }
  }
}

// Operands and result have rows of 3 unused elements.
void expect_chains(const ProductCase& c, bool symmetric) {
  const int64_t lda = (c.a_transposed ? c.rows : c.depth) + 3;
  const int64_t ldb = (c.b_transposed ? c.depth : c.cols) + 3;
  const int64_t ldc = c.cols + 3;
  const auto a = random_floats(lda * (c.a_transposed ? c.depth : c.rows), 1);
  const auto b = random_floats(ldb * (c.b_transposed ? c.cols : c.depth), 2);
  const auto addend = random_floats(ldc * c.rows, 3);
  const auto before = random_floats(ldc * c.rows, 4);
  auto result = before;
  Product p{.a = {a.data(), lda, c.a_transposed},
            .b = {b.data(), ldb, c.b_transposed},
            .c = result.data(),
            .ldc = ldc,
            .rows = c.rows,
            .cols = c.cols,
            .depth = c.depth,
            .symmetric = symmetric};
  if (c.has_addend) {
    p.addend = addend.data();
    p.alpha = 2.0315f;
    p.beta = -4.775f;
    p.diagonal = 3.4445f;
  }
  auto expected = before;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      expected[static_cast<size_t>(i * ldc + j)] = expected_element(p, i, j);
    }
  }
  for (const KernelTable* table : runnable_tables()) {
    for (const int64_t block : {kBlockCols, int64_t{96}}) {
      result = before;
      compute(*table, p, block, block);
      ASSERT_EQ(std::memcmp(result.data(), expected.data(), sizeof(float) * expected.size()), 0)
          << table->name << ", " << c.rows << " x " << c.cols << ", depth " << c.depth
          << ", blocks of " << block;
    }
  }
}

TEST(Product, IsAChainForEveryElement) {
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      for (const bool has_addend : {false, true}) {
        for (const auto& [rows, cols, depth] : std::vector<std::array<int64_t, 3>>{
                 {1, 1, 1}, {3, 70, 2}, {12, 32, 256}, {6, 16, 257}, {25, 5, 600}, {110, 100, 7}}) {
          expect_chains({rows, cols, depth, a_transposed, b_transposed, has_addend}, false);
        }
      }
    }
  }
}

TEST(Product, MirrorsTheUpperHalf) {
  for (const bool has_addend : {false, true}) {
    for (const int64_t size : {1, 2, 12, 31, 33, 97, 200}) {
      for (const int64_t depth : {1, 40, 300}) {
        expect_chains({size, size, depth, true, false, has_addend}, true);
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

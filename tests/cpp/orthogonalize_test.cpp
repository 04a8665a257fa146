// How much Newton-Schulz iterations multiply: the count of docs/muon.md, "Bytes and operations".
#include "work/orthogonalize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "cpu/product.h"
#include "support.h"

namespace torchopt_ext {
namespace {

NewtonSchulz jordan(size_t steps) {
  NewtonSchulz ns;
  ns.coefficients.assign(steps, {3.4445, -4.775, 2.0315});
  return ns;
}

// Returns the multiply-adds for a matrix; the elements that are mirror images take none.
double multiply_adds(const NewtonSchulz& ns, int64_t rows, int64_t cols) {
  std::vector<float> x(static_cast<size_t>(rows * cols), 1.0f);
  const cpu::Matrix matrix{x.data(), rows, cols, cols};
  std::vector<float> workspace(static_cast<size_t>(cpu::orthogonalize_workspace(matrix)));
  double count = 0.0;
  cpu::orthogonalize(ns, matrix, workspace.data(), [&](const Product& p) {
    const int64_t elements = p.symmetric ? p.rows * (p.rows + 1) / 2 : p.rows * p.cols;
    count += static_cast<double>(elements) * static_cast<double>(p.depth);
  });
  return count;
}

// Returns what a step takes with torch's products, for sides s <= l: s s (2 l + s) multiply-adds.
double with_torchs_products(int64_t rows, int64_t cols) {
  const auto s = static_cast<double>(std::min(rows, cols));
  return s * s * (2.0 * static_cast<double>(std::max(rows, cols)) + s);
}

TEST(Orthogonalize, TakesAboutHalfOfTorchsMultiplications) {
  double ours = 0.0;
  double torchs = 0.0;
  for (const auto& [rows, cols] : std::vector<std::array<int64_t, 2>>{
           {768, 2304}, {768, 768}, {768, 3072}, {3072, 768}}) {  // of a layer of GPT-2
    ours += multiply_adds(jordan(5), rows, cols);
    torchs += 5 * with_torchs_products(rows, cols);
  }
  EXPECT_NEAR(ours / torchs, 0.54, 0.005);
}

TEST(Orthogonalize, ASquareTakesTwoThirds) {
  const double torchs = 5 * with_torchs_products(1000, 1000);
  EXPECT_NEAR(multiply_adds(jordan(5), 1000, 1000) / torchs, 2.0 / 3.0, 0.001);
}

// (3 r + 4 s - 3) m^3 / 2 for a segment of s steps: two, two and one, as a^4 is 141 and a^6 1,670.
TEST(Orthogonalize, TakesTheGramForm) {
  constexpr double kRatio = 4.0;
  const double expected = 0.5e9 * (3 * (3 * kRatio - 3) + 4 * 5);
  for (const double count :
       {multiply_adds(jordan(5), 1000, 4000), multiply_adds(jordan(5), 4000, 1000)}) {
    EXPECT_NEAR(count / expected, 1.0, 0.002);
  }
}

}  // namespace
}  // namespace torchopt_ext

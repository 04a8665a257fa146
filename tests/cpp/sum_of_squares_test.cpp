// The bitwise contract of pass A: every instruction set's kernels and the body of the CUDA kernel
// give the same accumulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/norm.h"
#include "host_cta.h"
#include "support.h"
#include "work/work_list.h"

namespace torchopt_ext {
namespace {

ExactAccumulator sum_on_cpu(const KernelTable& table, const TensorWork& work, int64_t chunk) {
  ExactAccumulator acc{};
  for (const Chunk& piece : make_chunks({work}, chunk)) {
    table.add_squares[static_cast<int>(work.layout.grad)](
        element(work, kGrad, piece.begin), piece.count, work.row_length, /*next=*/nullptr, acc);
  }
  accumulator_normalize(acc);
  return acc;
}

ExactAccumulator sum_as_cuda(const TensorWork& work) {
  ExactAccumulator acc{};
  const std::vector<Chunk> chunks = make_chunks({work}, kBlockElements);
  const NormKernel<1> kernel{{},
                             {0, 1, {work.memory[kGrad]}},
                             &work,
                             chunks.data(),
                             static_cast<int64_t>(chunks.size()),
                             reinterpret_cast<int64_t*>(&acc)};
  run_on_host(kernel, 2);  // fewer blocks than the chunks could fill: warps stride
  EXPECT_EQ(std::isnan(accumulator_total(acc)),
            acc.limb[ExactAccumulator::kNans] != 0);  // while carries are pending
  const double total = accumulator_total(acc);
  accumulator_normalize(acc);
  EXPECT_EQ(bit_cast<uint64_t>(accumulator_total(acc)), bit_cast<uint64_t>(total));
  return acc;
}

TensorWork gradient(const void* memory, DType dtype, int64_t rows, int64_t row_length) {
  TensorWork work{};
  work.memory[kGrad] = const_cast<void*>(memory);
  work.numel = rows * row_length;
  work.row_length = row_length;
  work.layout.param = work.layout.grad = dtype;
  return work;
}

void expect_same_sum(const TensorWork& work, const char* what) {
  const ExactAccumulator expected = sum_on_cpu(default_kernels(), work, kChunkElements);
  for (const KernelTable* table : runnable_tables()) {
    for (const int64_t chunk : {int64_t{1}, int64_t{8192}, kChunkElements}) {
      const ExactAccumulator actual = sum_on_cpu(*table, work, chunk);
      ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0) << table->name << what;
    }
  }
  const ExactAccumulator actual = sum_as_cuda(work);
  ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0) << "cuda body" << what;
}

TEST(SumOfSquares, SameBitsOnEveryInstructionSetAndInTheCudaBody) {
  unsigned seed = 0;
  for (const DType dtype : kAllDTypes) {
    for (const int64_t row_length : {1, 3, 63, 64, 65, 129, 4096, 4097, 9000}) {
      for (const int64_t rows : {1, 5, 70}) {
        for (const int spread : {0, 12, 100}) {
          const auto grad = random_elements(dtype, rows * row_length, spread, ++seed);
          expect_same_sum(gradient(grad.data(), dtype, rows, row_length), " by row length");
        }
      }
    }
  }
}

// Kernels sum four or two blocks at a time. The number of blocks must not change the result.
TEST(SumOfSquares, SameBitsHoweverManyBlocksThereAre) {
  for (const DType dtype : kAllDTypes) {
    for (const int64_t row_length : {64, 100, 4096, 5000, 14336, 40000}) {
      for (const int64_t rows : {2, 3, 4, 6, 7, 8, 11}) {
        const auto grad = random_elements(dtype, rows * row_length, 12, 9);
        expect_same_sum(gradient(grad.data(), dtype, rows, row_length), " by number of blocks");
      }
    }
  }
}

TEST(SumOfSquares, SameBitsWhereverAGradientStarts) {
  for (const DType dtype : kAllDTypes) {
    for (const int64_t row_length : {1, 577, 5000}) {
      const int64_t rows = row_length == 1 ? 1500 : 3;
      const auto grad = random_elements(dtype, rows * row_length + 16, 12, 3);
      for (int64_t offset = 0; offset < 16; ++offset) {
        expect_same_sum(
            gradient(grad.data() + offset * element_size(dtype), dtype, rows, row_length),
            " by offset");
      }
    }
  }
}

// Gradients of about the same size need few bins (kernels/bins.h), gradients far apart need more.
// Every last bit of the smallest gradient counts.
TEST(SumOfSquares, SameBitsHoweverFarGradientsAreApart) {
  constexpr float kOdd = 0x1.fffffep0f;
  for (const int largest : {127, 60, 0, -60, -126}) {
    for (int apart = 0; apart < 277 && largest - apart >= -149; ++apart) {
      for (const int64_t n : {9, 4096}) {
        std::vector<float> grad(static_cast<size_t>(n), std::ldexp(kOdd, largest - apart));
        grad[0] = std::ldexp(kOdd, largest);
        grad[3] = 0.0f;
        expect_same_sum(gradient(grad.data(), DType::kFloat32, n, 1), " of one large element");
        std::fill(grad.begin(), grad.end(), -std::ldexp(kOdd, largest));
        grad[1] = std::ldexp(1.0f, std::max(largest - apart, -149));
        expect_same_sum(gradient(grad.data(), DType::kFloat32, n, 1), " of one small element");
      }
    }
  }
}

TEST(SumOfSquares, SameBitsOfDoublesWhoseSquaresUnderflowOrNearlyOverflow) {
  for (const int largest : {511, 490, 300, -300, -400, -490, -537, -600}) {
    for (const int apart : {0, 1, 30, 100, 500, 900}) {
      std::vector<double> grad(700);
      for (size_t i = 0; i < grad.size(); ++i) {
        grad[i] = std::ldexp(1.0 + 0x1p-52 * static_cast<double>(i),
                             i % 7 == 0 ? largest : largest - apart);
      }
      expect_same_sum(gradient(grad.data(), DType::kFloat64, 700, 1), " of extreme doubles");
    }
  }
}

TEST(SumOfSquares, FindsNonFiniteElementsWhereverTheyAre) {
  for (const int64_t row_length : {1, 300}) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      for (const int64_t at : {0, 1, 63, 64, 255, 256, 298, 299}) {
        std::vector<float> grad(300, 1.0f);
        grad[static_cast<size_t>(at)] = bad;
        const TensorWork work =
            gradient(grad.data(), DType::kFloat32, 300 / row_length, row_length);
        expect_same_sum(work, " with a non-finite element");
        const ExactAccumulator acc = sum_on_cpu(default_kernels(), work, kChunkElements);
        ASSERT_EQ(acc.limb[ExactAccumulator::kNans], std::isnan(bad) ? 1 : 0);
        ASSERT_EQ(acc.limb[ExactAccumulator::kInfinities], std::isnan(bad) ? 0 : 1);
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

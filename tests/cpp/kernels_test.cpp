// The bitwise contract: every instruction set's kernels and the bodies of the CUDA kernels, run on
// the host through loops over grid, block and thread, give the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/adam_slice.h"
#include "cpu/sum_of_squares_chunk.h"
#include "cuda/bodies.h"
#include "kernels/adam.h"
#include "support.h"

namespace torchopt_ext {
namespace {

using Memory = std::vector<unsigned char>;

// One tensor's memory for a step.
struct Tensor {
  Memory param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;
  float step = 3.0f;
  TensorWork work{};

  Tensor(DType param_dtype, DType state_dtype, int64_t rows, int64_t row_length, bool amsgrad,
         unsigned seed)
      : param(random_elements(param_dtype, rows * row_length, 2, seed)),
        grad(random_elements(param_dtype, rows * row_length, 12, seed + 1)),
        exp_avg(random_elements(state_dtype, rows * row_length, 10, seed + 2)),
        exp_avg_sq(random_elements(state_dtype, rows * row_length, 10, seed + 3)),
        max_exp_avg_sq(random_elements(state_dtype, rows * row_length, 10, seed + 4)) {
    for (Memory* squares : {&exp_avg_sq, &max_exp_avg_sq}) {  // not negative: clear sign bits
      for (size_t i = static_cast<size_t>(element_size(state_dtype)) - 1; i < squares->size();
           i += static_cast<size_t>(element_size(state_dtype))) {
        (*squares)[i] &= 0x7f;
      }
    }
    work.numel = rows * row_length;
    work.row_length = row_length;
    work.param_dtype = param_dtype;
    work.state_dtype = state_dtype;
    with_amsgrad_ = amsgrad;
  }
  void point() {
    work.param = param.data();
    work.grad = grad.data();
    work.exp_avg = exp_avg.data();
    work.exp_avg_sq = exp_avg_sq.data();
    work.max_exp_avg_sq = with_amsgrad_ ? max_exp_avg_sq.data() : nullptr;
    work.step = &step;
  }
  bool same_bits(const Tensor& other) const {
    return param == other.param && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq &&
           max_exp_avg_sq == other.max_exp_avg_sq && step == other.step;
  }

 private:
  bool with_amsgrad_ = false;
};

AdamHyper hyper_of(int variant) {
  return {.lr = 1e-2,
          .beta1 = variant % 2 == 0 ? 0.9 : 0.3,
          .beta2 = variant % 3 == 0 ? 0.3 : 0.999,
          .eps = 1e-8,
          .weight_decay = variant % 4 == 3 ? 0.0 : 0.1,
          .decoupled_weight_decay = variant % 5 != 0,
          .maximize = variant % 7 == 0};
}

void step_on_cpu(const KernelTable& table, Tensor& tensor, const AdamHyper& hyper, double factor,
                 int64_t chunk_elements) {
  tensor.point();
  tensor.step += 1.0f;
  for (const Chunk& chunk : make_chunks({tensor.work}, chunk_elements)) {
    const auto step = static_cast<int64_t>(tensor.step);
    if (tensor.work.param_dtype == DType::kFloat64) {
      adam_slice(table, adam_scalars<double>(hyper, step, factor), tensor.work, chunk.begin,
                 chunk.end);
    } else {
      adam_slice(table, adam_scalars<float>(hyper, step, factor), tensor.work, chunk.begin,
                 chunk.end);
    }
  }
}

void step_as_cuda(Tensor& tensor, const AdamHyper& hyper, const Control& control, int threads) {
  tensor.point();
  const std::vector<Chunk> chunks = make_chunks({tensor.work});
  const GroupArgs group{hyper, nullptr, DType::kFloat64};
  const AdamArgs args{&tensor.work, chunks.data(), &group, &control, 1};
  for (int64_t i = 0; i < 256; ++i) {  // one block of threads over one tensor
    advance_steps_body(i, args);
  }
  for (size_t block = 0; block < chunks.size(); ++block) {
    HostCta cta(static_cast<int64_t>(block), threads);
    adam_body(cta, args);
  }
}

TEST(Adam, SameBitsOnEveryInstructionSetAndInTheCudaBody) {
  int variant = 0;
  for (const DType param_dtype : kAllDTypes) {
    for (const DType state_dtype : kAllDTypes) {
      if ((param_dtype == DType::kFloat64) != (state_dtype == DType::kFloat64)) {
        continue;
      }
      for (const int64_t numel : {1, 7, 16, 31, 100, 513, 40000}) {
        ++variant;
        const bool amsgrad = variant % 2 == 1;
        const AdamHyper hyper = hyper_of(variant);
        Control control{};
        control.grad_factor = 0.37;
        const Tensor start(param_dtype, state_dtype, 1, numel, amsgrad,
                           static_cast<unsigned>(variant));
        Tensor expected = start;
        step_on_cpu(default_kernels(), expected, hyper, control.grad_factor, kChunkElements);
        ASSERT_FALSE(expected.same_bits(start));
        for (const KernelTable* table : runnable_tables()) {
          for (const int64_t chunk : {int64_t{4096}, kChunkElements}) {
            Tensor actual = start;
            step_on_cpu(*table, actual, hyper, control.grad_factor, chunk);
            ASSERT_TRUE(actual.same_bits(expected)) << table->name << " variant " << variant;
          }
        }
        for (const int threads : {32, 256}) {
          Tensor actual = start;
          step_as_cuda(actual, hyper, control, threads);
          ASSERT_TRUE(actual.same_bits(expected)) << "cuda body, variant " << variant;
        }
      }
    }
  }
}

TEST(Adam, ASkippedStepChangesNothingInTheCudaBody) {
  Control control{};
  control.grad_factor = 1.0;
  control.skip = 1.0;
  Tensor tensor(DType::kFloat32, DType::kFloat32, 3, 700, true, 5);
  const Tensor start = tensor;
  step_as_cuda(tensor, hyper_of(1), control, 256);
  EXPECT_TRUE(tensor.same_bits(start));
}

ExactAccumulator sum_on_cpu(const KernelTable& table, const TensorWork& work, int64_t chunk) {
  ExactAccumulator acc{};
  for (const Chunk& piece : make_chunks({work}, chunk)) {
    add_chunk(table, work, piece, acc);
  }
  accumulator_normalize(acc);
  return acc;
}

ExactAccumulator sum_as_cuda(const TensorWork& work, int threads) {
  ExactAccumulator acc{};
  const std::vector<Chunk> chunks = make_chunks({work});
  const SumOfSquaresArgs args{&work, chunks.data(), reinterpret_cast<int64_t*>(&acc)};
  for (size_t block = 0; block < chunks.size(); ++block) {
    HostCta cta(static_cast<int64_t>(block), threads);
    sum_of_squares_body(cta, args);
  }
  accumulator_normalize(acc);
  return acc;
}

void expect_same_sum(const TensorWork& work, const char* what) {
  const ExactAccumulator expected = sum_on_cpu(default_kernels(), work, kChunkElements);
  for (const KernelTable* table : runnable_tables()) {
    for (const int64_t chunk : {int64_t{1}, int64_t{8192}, kChunkElements}) {
      const ExactAccumulator actual = sum_on_cpu(*table, work, chunk);
      ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0) << table->name << what;
    }
  }
  for (const int threads : {32, 256}) {
    const ExactAccumulator actual = sum_as_cuda(work, threads);
    ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0) << "cuda body" << what;
  }
}

TEST(SumOfSquares, SameBitsOnEveryInstructionSetAndInTheCudaBody) {
  unsigned seed = 0;
  for (const DType dtype : kAllDTypes) {
    for (const int64_t row_length : {1, 3, 63, 64, 65, 129, 4096, 4097, 9000}) {
      for (const int64_t rows : {1, 5, 70}) {
        for (const int spread : {0, 12, 100}) {
          const Memory grad = random_elements(dtype, rows * row_length, spread, ++seed);
          TensorWork work{};
          work.grad = grad.data();
          work.numel = rows * row_length;
          work.row_length = row_length;
          work.param_dtype = dtype;
          expect_same_sum(work, " by row length");
        }
      }
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
        TensorWork work{};
        work.grad = grad.data();
        work.numel = 300;
        work.row_length = row_length;
        expect_same_sum(work, " with a non-finite element");
        const ExactAccumulator acc = sum_on_cpu(default_kernels(), work, kChunkElements);
        ASSERT_EQ(acc.nans, std::isnan(bad) ? 1 : 0);
        ASSERT_EQ(acc.infinities, std::isnan(bad) ? 0 : 1);
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

#include "plan/normalize_rows.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>

#include <array>
#include <cmath>
#include <vector>

#include "cpu/float_mode.h"

namespace torchopt_ext {
namespace {

constexpr double kEps = 1e-8;
// Elements for which a thread is worth starting.
constexpr int64_t kElementsPerThread = 1 << 14;

// Squares of float32 are exact in double, and the sums of a row have a fixed order.
template <class T>
double sum_of_squares(const T* row, int64_t cols) {
  constexpr size_t kSums = 8;
  std::array<double, kSums> sums{};
  int64_t j = 0;
  for (; j + static_cast<int64_t>(kSums) <= cols; j += static_cast<int64_t>(kSums)) {
    for (size_t k = 0; k < kSums; ++k) {
      const auto x = static_cast<double>(static_cast<float>(row[j + static_cast<int64_t>(k)]));
      sums[k] += x * x;
    }
  }
  for (size_t k = 0; j < cols; ++j, ++k) {
    const auto x = static_cast<double>(static_cast<float>(row[j]));
    sums[k] += x * x;
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

template <class T>
void normalize_on_cpu(T* matrices, int64_t batch, int64_t rows, int64_t cols,
                      const RowMoments& moments) {
  const FloatMode mode;
  std::vector<double> squares(static_cast<size_t>(batch * rows));
  std::vector<double> factors(squares.size());
  const int64_t rows_per_thread =
      std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, cols));
  at::parallel_for(0, batch * rows, rows_per_thread, [&](int64_t begin, int64_t end) {
    const FloatMode of_thread;
    for (int64_t i = begin; i < end; ++i) {
      const double sum = sum_of_squares(matrices + i * cols, cols);
      float& average = moments.second_momentum[i];
      average = static_cast<float>(moments.beta2 * average +
                                   (1.0 - moments.beta2) * (sum / static_cast<double>(cols)));
      squares[static_cast<size_t>(i)] = sum;
      factors[static_cast<size_t>(i)] = 1.0 / (std::sqrt(static_cast<double>(average)) + kEps);
    }
  });
  for (int64_t matrix = 0; matrix < batch; ++matrix) {
    double before = 0.0;
    double after = 0.0;
    for (int64_t i = matrix * rows; i < (matrix + 1) * rows; ++i) {
      const auto at = static_cast<size_t>(i);
      before += squares[at];
      after += squares[at] * factors[at] * factors[at];
    }
    const double ratio = std::sqrt(before) / (std::sqrt(after) + kEps);
    for (int64_t i = matrix * rows; i < (matrix + 1) * rows; ++i) {
      factors[static_cast<size_t>(i)] *= ratio;
    }
  }
  at::parallel_for(0, batch * rows, rows_per_thread, [&](int64_t begin, int64_t end) {
    const FloatMode of_thread;
    for (int64_t i = begin; i < end; ++i) {
      const auto factor = static_cast<float>(factors[static_cast<size_t>(i)]);
      T* const row = matrices + i * cols;
      for (int64_t j = 0; j < cols; ++j) {
        row[j] = static_cast<T>(static_cast<float>(row[j]) * factor);
      }
    }
  });
}

// Normalizes each matrix of [batch, rows, cols], contiguous.
void normalize(const at::Tensor& matrices, const RowMoments& moments, const at::Tensor& skip) {
  const int64_t batch = matrices.size(0);
  const int64_t rows = matrices.size(1);
  if (matrices.numel() == 0) {
    return;
  }
  if (matrices.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, matrices.scalar_type(), "normalize_rows", [&] {
          normalize_on_cpu(matrices.data_ptr<scalar_t>(), batch, rows, matrices.size(2), moments);
        });
    return;
  }
  const at::Tensor average = at::from_blob(moments.second_momentum, {batch, rows, 1},
                                           matrices.options().dtype(at::kFloat));
  const at::Tensor x = matrices.to(at::kFloat);
  const at::Tensor squares = x.square().sum(2, /*keepdim=*/true);
  const at::Tensor averaged = average.lerp(squares / matrices.size(2), 1.0 - moments.beta2);
  average.copy_(skip.defined() ? at::where(skip == 0.0, averaged, average) : averaged);
  const at::Tensor factors = (average.sqrt() + kEps).reciprocal();
  const at::Tensor before = squares.sum(1, /*keepdim=*/true).sqrt();
  const at::Tensor after = (squares * factors.square()).sum(1, /*keepdim=*/true).sqrt() + kEps;
  matrices.copy_(x * (factors * (before / after)));
}

}  // namespace

void normalize_rows(const at::Tensor& buffer, const std::vector<Matrix>& matrices,
                    RowMoments moments, const at::Tensor& skip) {
  for (size_t i = 0; i < matrices.size();) {
    const auto& [first, rows, cols, stride, lr_scale] = matrices[i];
    int64_t batch = 0;
    for (; i < matrices.size() && matrices[i].rows == rows; ++i) {
      ++batch;
    }
    normalize(buffer.narrow(0, first, batch * rows * cols).view({batch, rows, cols}), moments,
              skip);
    moments.second_momentum += batch * rows;
  }
}

}  // namespace torchopt_ext

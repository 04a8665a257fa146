// What Newton-Schulz iterations in fp32 and in bf16 share: the norm, the segments, and how several
// matrices are shared out among the threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <type_traits>

#include "cpu/kernel_table.h"
#include "cpu/multiply.h"
#include "work/orthogonalize.h"

namespace torchopt_ext::cpu {

// Below this many elements a second thread costs more time than it saves.
inline constexpr int64_t kElementsPerThread = 32768;
// A matrix whose product X X^T takes at most this many multiply-adds is small: one thread
// orthogonalizes it in milliseconds.
inline constexpr int64_t kSmallProduct = int64_t{1} << 27;

// Calls body(first, last) on ranges of rows.
template <class T, class Body>
void for_rows(const MatrixOf<T>& m, const Body& body) {
  const int64_t threads = std::min(m.rows, useful_threads(m.rows * m.cols, kElementsPerThread));
  at::parallel_for(0, m.rows, ceil_div(m.rows, threads), [&](int64_t first, int64_t last) {
    const FloatMode mode;
    body(first, last);
  });
}

// Returns the sum of squares, correctly rounded. It depends neither on the order of the elements
// nor on the orientation.
template <class T>
double sum_of_squares(const MatrixOf<T>& m) {
  constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16;
  ExactAccumulator total{};
  std::mutex mutex;
  for_rows(m, [&](int64_t first, int64_t last) {
    ExactAccumulator acc{};
    const auto add = kernels().add_squares[static_cast<int>(kDType)];
    const bool is_dense = m.ld == m.cols;
    const int64_t runs = is_dense ? 1 : last - first;
    const int64_t length = (last - first) / runs * m.cols;
    int64_t pending = 0;
    for (int64_t i = 0; i < runs; ++i) {
      for (int64_t begin = 0; begin < length; begin += ExactAccumulator::kMaxPendingAdds) {
        const int64_t n = std::min(length - begin, ExactAccumulator::kMaxPendingAdds);
        pending += n;
        if (pending > ExactAccumulator::kMaxPendingAdds) {
          accumulator_normalize(acc);
          pending = n;
        }
        add(m.x + (first + i) * m.ld + begin, n, /*row_length=*/1, /*next=*/nullptr, acc);
      }
    }
    accumulator_normalize(acc);
    const std::scoped_lock lock(mutex);
    accumulator_merge(total, acc);
  });
  return accumulator_total(total);
}

// Returns 1 / max(|x|, eps), or 0 instead of infinity. If x has a NaN or infinity, fills x with NaN
// and returns nothing.
template <class T>
std::optional<double> inverse_norm(const MatrixOf<T>& x, double eps) {
  const double sum = sum_of_squares(x);
  if (!std::isfinite(sum)) {
    for_rows(x, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        std::fill_n(x.x + i * x.ld, x.cols, narrow<T>(canonical_nan(0.0f)));
      }
    });
    return std::nullopt;
  }
  const double norm = std::max(std::sqrt(sum), eps);
  return norm == 0.0 ? 0.0 : 1.0 / norm;
}

// Successive steps form a segment. With R = X X^T each step multiplies X by Q = a I + b R + c R^2
// from the left, and R by Q from both sides. A segment computes R from X once, continues with R,
// and multiplies X by the product of all Q at the end (the Gram form: dao-lab.ai/blog/2026/
// gram-newton-schulz). All these matrices are polynomials of the first R: symmetric, and they
// commute. For an X of m rows and r m columns a segment of s steps takes (3 r + 4 s - 3) m^3 / 2
// multiply-adds, half of a product's where the result is symmetric, so a square X has nothing to
// gain from more than one step.
//
// R from X has rounding errors, where X's singular values may be 0. A step multiplies them by a^2,
// while a new R is again as exact as X. So a segment ends before the product of its a^2 exceeds
// `most_growth`.
inline size_t segment_end(const NewtonSchulz& ns, size_t first, bool is_square,
                          double most_growth) {
  size_t end = first + 1;
  if (!is_square) {
    const auto growth = [&](size_t step) {
      const double a = ns.coefficients[step][0];
      return std::max(a * a, 1.0);
    };
    double product = growth(first);
    for (; end < ns.coefficients.size() && product * growth(end) <= most_growth; ++end) {
      product *= growth(end);
    }
  }
  return end;
}

template <class T>
bool is_small(const MatrixOf<T>& m) {
  return m.rows * m.cols * std::min(m.rows, m.cols) <= kSmallProduct;
}

// Returns how many floats of workspace orthogonalize_all() needs.
template <class T>
int64_t workspace_of_all(const std::vector<MatrixOf<T>>& matrices) {
  int64_t largest = 0;
  int64_t largest_small = 0;
  for (const MatrixOf<T>& m : matrices) {
    const int64_t floats = orthogonalize_workspace(m);
    largest = std::max(largest, floats);
    largest_small = std::max(largest_small, is_small(m) ? floats : 0);
  }
  return std::max(largest, largest_small * at::get_num_threads());
}

// Calls one(matrix, workspace) for each matrix. A call uses all threads, but if there are many
// small matrices, each thread makes calls for some of them.
template <class T, class One>
void orthogonalize_all(const std::vector<MatrixOf<T>>& matrices, float* workspace, const One& one) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const auto small = std::count_if(matrices.begin(), matrices.end(), is_small<T>);
  const bool shared_out = threads > 1 && small >= 2 * threads;
  int64_t floats = 0;
  for (const MatrixOf<T>& m : matrices) {
    if (!shared_out || !is_small(m)) {
      one(m, workspace);
    } else {
      floats = std::max(floats, orthogonalize_workspace(m));
    }
  }
  if (shared_out) {
    share_out(threads, static_cast<int64_t>(matrices.size()), [&](int64_t i, int64_t share) {
      const MatrixOf<T>& m = matrices[static_cast<size_t>(i)];
      if (is_small(m)) {
        one(m, workspace + share * floats);
      }
    });
  }
}

}  // namespace torchopt_ext::cpu

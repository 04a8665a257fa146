// Newton-Schulz iterations on fp32 matrices: docs/numerics.md section 12.
#include "work/orthogonalize.h"

#include <atomic>
#include <cmath>
#include <mutex>

#include "cpu/float_mode.h"
#include "cpu/kernel_table.h"
#include "cpu/multiply.h"

namespace torchopt_ext::cpu {
namespace {

// Below this many elements a second thread costs more time than it saves.
constexpr int64_t kElementsPerThread = 32768;
// A matrix whose product X X^T takes at most this many multiply-adds is small: one thread
// orthogonalizes it in milliseconds.
constexpr int64_t kSmallProduct = int64_t{1} << 27;

// Calls body(first, last) on ranges of rows.
template <class Body>
void for_rows(const Matrix& m, const Body& body) {
  const int64_t threads = std::min(m.rows, useful_threads(m.rows * m.cols, kElementsPerThread));
  at::parallel_for(0, m.rows, ceil_div(m.rows, threads), [&](int64_t first, int64_t last) {
    const FloatMode mode;
    body(first, last);
  });
}

// Returns the sum of squares, correctly rounded. It depends neither on the order of the elements
// nor on the orientation.
double sum_of_squares(const Matrix& m) {
  ExactAccumulator total{};
  std::mutex mutex;
  for_rows(m, [&](int64_t first, int64_t last) {
    ExactAccumulator acc{};
    const auto add = kernels().add_squares[static_cast<int>(DType::kFloat32)];
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

// to = from / max(|from|, eps). Returns false and fills `from` with NaN if it has a NaN or
// infinity.
bool normalize(const Matrix& from, const Matrix& to, double eps) {
  const double sum = sum_of_squares(from);
  if (!std::isfinite(sum)) {
    for_rows(from, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        std::fill_n(from.x + i * from.ld, from.cols, canonical_nan(0.0f));
      }
    });
    return false;
  }
  const double norm = std::max(std::sqrt(sum), eps);
  const double factor = norm == 0.0 ? 0.0 : 1.0 / norm;
  for_rows(from, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      kernels().scale(to.x + i * to.ld, from.x + i * from.ld, factor, from.cols);
    }
  });
  return true;
}

// Successive steps form a segment. With R = X X^T each step multiplies X by Q = a I + b R + c R^2
// from the left, and R by Q from both sides. A segment computes R from X once, continues with R,
// and multiplies X by the product of all Q at the end (the Gram form: dao-lab.ai/blog/2026/
// gram-newton-schulz). All these matrices are polynomials of the first R: symmetric, and they
// commute. For an X of m rows and r m columns a segment of s steps takes (3 r + 4 s - 3) m^3 / 2
// multiply-adds, half of a product's where the result is symmetric, so a square X has nothing to
// gain from more than one step.
//
// R from X has rounding errors of about 1e-7, where X's singular values may be 0. A step multiplies
// them by a^2, while a new R is again as exact as X. So a segment ends before the product of its
// a^2 exceeds 1,024.
constexpr double kMostGrowth = 1024.0;

size_t segment_end(const NewtonSchulz& ns, size_t first, bool is_square) {
  size_t end = first + 1;
  if (!is_square) {
    const auto growth = [&](size_t step) {
      const double a = ns.coefficients[step][0];
      return std::max(a * a, 1.0);
    };
    double product = growth(first);
    for (; end < ns.coefficients.size() && product * growth(end) <= kMostGrowth; ++end) {
      product *= growth(end);
    }
  }
  return end;
}

// m x m matrices, all symmetric. Their rows follow each other.
struct Square {
  float* x;
  int64_t m;
  Operand operand() const { return {x, m, true}; }  // contiguous where `a` is packed
};

Product square_product(const Square& a, const Square& b, const Square& c) {
  const int64_t m = a.m;
  return {.a = a.operand(),
          .b = {b.x, m, false},
          .c = c.x,
          .ldc = m,
          .rows = m,
          .cols = m,
          .depth = m,
          .symmetric = true};
}

// R = X X^T for wide X, X^T X for tall X.
Product gram(const Matrix& x, bool is_wide, const Square& r) {
  return {.a = {x.x, x.ld, !is_wide},
          .b = {x.x, x.ld, is_wide},
          .c = r.x,
          .ldc = r.m,
          .rows = r.m,
          .cols = r.m,
          .depth = is_wide ? x.cols : x.rows,
          .symmetric = true};
}

// Q = a I + b R + c R^2
Product polynomial(const std::array<double, 3>& coefficients, const Square& r, const Square& q) {
  Product p = square_product(r, r, q);
  p.addend = r.x;
  p.diagonal = static_cast<float>(coefficients[0]);
  p.beta = static_cast<float>(coefficients[1]);
  p.alpha = static_cast<float>(coefficients[2]);
  return p;
}

// to = Q X for wide X, X Q for tall X.
Product apply(const Square& q, const Matrix& x, bool is_wide, const Matrix& to) {
  const Operand matrix{x.x, x.ld, false};
  return {.a = is_wide ? q.operand() : matrix,
          .b = is_wide ? matrix : Operand{q.x, q.m, false},
          .c = to.x,
          .ldc = to.ld,
          .rows = x.rows,
          .cols = x.cols,
          .depth = q.m,
          .symmetric = false};
}

// Runs the steps [first, last) of a segment: to = (product of all Q) from.
void segment(const NewtonSchulz& ns, size_t first, size_t last, const Matrix& from,
             const Matrix& to, float* workspace, const Multiply& run) {
  const bool is_wide = from.rows <= from.cols;
  const int64_t m = std::min(from.rows, from.cols);
  const auto square = [&](int64_t number) { return Square{workspace + number * m * m, m}; };
  const Square r = square(0);
  Square all = square(1);  // the product of all Q
  Square other = square(2);
  const Square q = square(3);
  run(gram(from, is_wide, r));
  for (size_t step = first; step < last; ++step) {
    const Square& factor = step == first ? all : q;
    run(polynomial(ns.coefficients[step], r, factor));
    if (step > first) {
      run(square_product(q, all, other));
      std::swap(all, other);
    }
    if (step + 1 < last) {
      const Square& now = step == first ? all : q;
      run(square_product(now, r, other));
      run(square_product(other, now, r));
    }
  }
  run(apply(all, from, is_wide, to));
}

bool is_small(const Matrix& m) {
  const int64_t shorter = std::min(m.rows, m.cols);
  return m.rows * m.cols * shorter <= kSmallProduct;
}

}  // namespace

int64_t orthogonalize_workspace(const NewtonSchulz& /*ns*/, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols);
  const int64_t floats = rows * cols + m * m * (rows == cols ? 2 : 4);
  return ceil_div(floats, 16) * 16;
}

void orthogonalize(const NewtonSchulz& ns, const Matrix& x, float* workspace, const Multiply& run) {
  if (x.rows == 0 || x.cols == 0) {
    return;
  }
  const FloatMode mode;
  const bool is_square = x.rows == x.cols;
  const Matrix other{workspace + orthogonalize_workspace(ns, x.rows, x.cols) - x.rows * x.cols,
                     x.rows, x.cols, x.cols};
  const size_t steps = ns.coefficients.size();
  bool is_in_x = true;  // so that the last segment ends in x
  for (size_t i = 0; i < steps; i = segment_end(ns, i, is_square)) {
    is_in_x = !is_in_x;
  }
  if (!normalize(x, is_in_x ? x : other, ns.eps)) {
    return;
  }
  for (size_t i = 0; i < steps; is_in_x = !is_in_x) {
    const size_t end = segment_end(ns, i, is_square);
    segment(ns, i, end, is_in_x ? x : other, is_in_x ? other : x, workspace, run);
    i = end;
  }
}

int64_t orthogonalize_workspace(const NewtonSchulz& ns, const std::vector<Matrix>& matrices) {
  int64_t largest = 0;
  int64_t largest_small = 0;
  for (const Matrix& m : matrices) {
    const int64_t floats = orthogonalize_workspace(ns, m.rows, m.cols);
    largest = std::max(largest, floats);
    largest_small = std::max(largest_small, is_small(m) ? floats : 0);
  }
  return std::max(largest, largest_small * at::get_num_threads());
}

void orthogonalize(const NewtonSchulz& ns, const std::vector<Matrix>& matrices, float* workspace) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const auto small = std::count_if(matrices.begin(), matrices.end(), is_small);
  const bool shared_out = threads > 1 && small >= 2 * threads;
  int64_t floats = 0;
  for (const Matrix& m : matrices) {
    if (!shared_out || !is_small(m)) {
      orthogonalize(ns, m, workspace);
    } else {
      floats = std::max(floats, orthogonalize_workspace(ns, m.rows, m.cols));
    }
  }
  if (shared_out) {
    std::atomic<size_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t share, int64_t) {
      for (size_t i = next++; i < matrices.size(); i = next++) {
        if (is_small(matrices[i])) {
          orthogonalize(ns, matrices[i], workspace + share * floats);
        }
      }
    });
  }
}

}  // namespace torchopt_ext::cpu

// Newton-Schulz iterations on fp32 matrices: docs/numerics.md section 12.
#include "cpu/newton_schulz.h"

namespace torchopt_ext::cpu {
namespace {

// Rounding errors of R are about 1e-7.
constexpr double kMostGrowth = 1024.0;

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

}  // namespace

int64_t orthogonalize_workspace(const Matrix& x) {
  const int64_t m = std::min(x.rows, x.cols);
  const int64_t floats = x.rows * x.cols + m * m * (x.rows == x.cols ? 2 : 4);
  return ceil_div(floats, 16) * 16;
}

void orthogonalize(const NewtonSchulz& ns, const Matrix& x, float* workspace, const Multiply& run) {
  if (x.rows == 0 || x.cols == 0) {
    return;
  }
  const FloatMode mode;
  const bool is_square = x.rows == x.cols;
  const Matrix other{workspace + orthogonalize_workspace(x) - x.rows * x.cols, x.rows, x.cols,
                     x.cols};
  const size_t steps = ns.coefficients.size();
  bool is_in_x = true;  // so that the last segment ends in x
  for (size_t i = 0; i < steps; i = segment_end(ns, i, is_square, kMostGrowth)) {
    is_in_x = !is_in_x;
  }
  const std::optional<double> factor = inverse_norm(x, ns.eps);
  if (!factor) {
    return;
  }
  const Matrix& start = is_in_x ? x : other;
  for_rows(x, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      kernels().scale(start.x + i * start.ld, x.x + i * x.ld, *factor, x.cols);
    }
  });
  for (size_t i = 0; i < steps; is_in_x = !is_in_x) {
    const size_t end = segment_end(ns, i, is_square, kMostGrowth);
    segment(ns, i, end, is_in_x ? x : other, is_in_x ? other : x, workspace, run);
    i = end;
  }
}

int64_t orthogonalize_workspace(const std::vector<Matrix>& matrices) {
  return workspace_of_all(matrices);
}

void orthogonalize(const NewtonSchulz& ns, const std::vector<Matrix>& matrices, float* workspace) {
  orthogonalize_all(matrices, workspace, [&](const Matrix& matrix, float* memory) {
    orthogonalize(ns, matrix, memory);
  });
}

}  // namespace torchopt_ext::cpu

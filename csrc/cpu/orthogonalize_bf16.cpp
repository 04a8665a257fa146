// Newton-Schulz iterations on bf16 matrices, by products with sums in fp32.
#include <numeric>

#include "cpu/newton_schulz.h"
#include "cpu/product_bf16.h"

namespace torchopt_ext::cpu {
namespace bf16 {
namespace {

// Rounding errors of R, about 1e-3, grow to 0.15 at most. Times b they enter the next Q, beside a.
constexpr double kMostGrowth = 150.0;
constexpr int64_t kProductPerThread = int64_t{1} << 22;  // multiply-adds worth a second thread

int64_t padded(int64_t size) { return ceil_div(size, kBf16Tile) * kBf16Tile; }

const Bf16Kernels* kernels_of_cpu() {
#ifdef __x86_64__
  static const Bf16Kernels* const chosen =
      &kernels() == &avx512_kernels() ? bf16_kernels() : nullptr;
  return chosen;
#else
  return nullptr;
#endif
}

void multiply(const Bf16Product& p) {
  const int64_t operations = p.rows * p.cols * p.depth / (p.symmetric ? 2 : 1);
  const int64_t threads = useful_threads(operations, kProductPerThread);
  int64_t block_rows = kBf16BlockRows;
  const int64_t columns = ceil_div(p.cols, kBf16BlockCols);
  while (block_rows > 2 * kBf16Tile && ceil_div(p.rows, block_rows) * columns < 4 * threads) {
    block_rows /= 2;
  }
  const int64_t rows = ceil_div(p.rows, block_rows);
  share_out(threads, rows * columns, [&](int64_t i, int64_t) {
    const int64_t row = i % rows * block_rows;
    const int64_t col = (columns - 1 - i / rows) * kBf16BlockCols;  // the longest columns first
    const int64_t last_col = std::min(col + kBf16BlockCols, p.cols);
    const int64_t last_row =
        std::min(row + block_rows, p.symmetric ? std::min(p.rows, last_col) : p.rows);
    if (row < last_row) {
      kernels_of_cpu()->product(p, {row, last_row, col, last_col}, scratch<Bf16Scratch>());
    }
  });
}

// to = the transpose of `from`, of whole tiles.
void transpose(const Bf16Matrix& from, const Bf16Matrix& to) {
  const int64_t strips = from.rows / kBf16Tile;
  const int64_t threads =
      std::min(strips, useful_threads(from.rows * from.cols, kElementsPerThread));
  at::parallel_for(0, strips, ceil_div(strips, threads), [&](int64_t first, int64_t last) {
    kernels_of_cpu()->transpose(from.x + first * kBf16Tile * from.ld, from.ld,
                                (last - first) * kBf16Tile, from.cols, to.x + first * kBf16Tile,
                                to.ld);
  });
}

// A symmetric matrix d I + p. The mean of p's diagonal is about 0: R and Q are close to multiples
// of I, so p's elements are small, and so are their rounding errors.
struct Square {
  BFloat16* p;
  double d;
};

// Computes symmetric matrices of `rows` rows and columns, padded with zeros to `padded`.
struct Squares {
  int64_t rows;
  int64_t padded;
  float* diagonal;

  // c = shift I + the product, whose other fields are filled in.
  void multiply(Square& c, double shift, Bf16Product product) const {
    product.c = c.p;
    product.ldc = product.rows = product.cols = padded;
    product.symmetric = true;
    product.diagonal = diagonal;
    bf16::multiply(product);
    const double mean = std::accumulate(diagonal, diagonal + rows, 0.0) / static_cast<double>(rows);
    for (int64_t i = 0; i < rows; ++i) {
      c.p[i * padded + i] = narrow<BFloat16>(static_cast<float>(diagonal[i] - mean));
    }
    c.d = shift + mean;
  }

  // q = a I + b r + c r^2
  void polynomial(Square& q, const std::array<double, 3>& abc, const Square& r) const {
    const auto [a, b, c] = abc;
    multiply(q, a + r.d * (b + c * r.d),
             {.a = {r.p, padded, false},
              .b = {r.p, padded, true},
              .depth = padded,
              .alpha = static_cast<float>(c),
              .addend = {r.p, nullptr},
              .beta = {static_cast<float>(b + 2 * c * r.d), 0.0f}});
  }

  // c = a b, of matrices that commute
  void multiply(Square& c, const Square& a, const Square& b) const {
    multiply(c, a.d * b.d,
             {.a = {a.p, padded, false},
              .b = {b.p, padded, true},
              .depth = padded,
              .addend = {a.p, b.p},
              .beta = {static_cast<float>(b.d), static_cast<float>(a.d)}});
  }
};

// Runs the steps [first, last) of a segment (newton_schulz.h) on `scale` times a wide matrix, whose
// rows from `rows` on are zeros.
void segment(const NewtonSchulz& ns, size_t first, size_t last, int64_t rows, double scale,
             const Bf16Matrix& from, const Bf16Matrix& to, BFloat16* workspace) {
  const int64_t m = from.rows;
  const Squares squares{rows, m, reinterpret_cast<float*>(workspace)};
  workspace += 2 * m;
  Square r{workspace, 0.0};
  Square all{workspace + m * m, 0.0};  // the product of all Q
  Square other{workspace + 2 * m * m, 0.0};
  Square q{workspace + 3 * m * m, 0.0};
  squares.multiply(r, 0.0,
                   {.a = {from.x, from.ld, false},
                    .b = {from.x, from.ld, true},
                    .depth = from.cols,
                    .alpha = static_cast<float>(scale * scale)});
  for (size_t step = first; step < last; ++step) {
    Square& now = step == first ? all : q;
    squares.polynomial(now, ns.coefficients[step], r);
    if (step > first) {
      squares.multiply(other, q, all);
      std::swap(all, other);
    }
    if (step + 1 < last) {  // R = Q^2 R
      squares.multiply(other, now, r);
      squares.multiply(r, now, other);
    }
  }
  multiply({.a = {all.p, m, false},
            .b = {from.x, from.ld, false},
            .c = to.x,
            .ldc = to.ld,
            .rows = m,
            .cols = from.cols,
            .depth = m,
            .alpha = static_cast<float>(scale),
            .addend = {from.x, nullptr},
            .beta = {static_cast<float>(all.d * scale), 0.0f}});
}

// A matrix in the workspace: wide, with sides that are multiples of a tile, padded with zeros,
// which the products keep.
struct Wide {
  int64_t rows;
  int64_t cols;

  explicit Wide(const Bf16Matrix& x)
      : rows(padded(std::min(x.rows, x.cols))), cols(padded(std::max(x.rows, x.cols))) {}
  int64_t numel() const { return rows * cols; }
};

// to = factor * from, padded with zeros.
void load(const Bf16Matrix& from, double factor, const Bf16Matrix& to) {
  constexpr int kBf16 = static_cast<int>(DType::kBFloat16);
  const auto scale = kernels().scaled_copy[kBf16][kBf16];
  // Outside of float's range, a power of two is a factor of its own.
  const bool is_extreme = factor != 0.0 && !(factor > 0x1p-120 && factor < 0x1p120);
  const double power = is_extreme ? std::ldexp(1.0, std::ilogb(factor) / 2) : 1.0;
  for_rows(to, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      BFloat16* const row = to.x + i * to.ld;
      const int64_t cols = i < from.rows ? from.cols : 0;
      scale(row, from.x + i * from.ld, factor / power, cols, /*past_caches=*/false);
      if (is_extreme) {
        scale(row, row, power, cols, /*past_caches=*/false);
      }
      std::fill(row + cols, row + to.cols, BFloat16{});
    }
  });
}

void store(const Bf16Matrix& from, const Bf16Matrix& to) {
  for_rows(to, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::copy_n(from.x + i * from.ld, to.cols, to.x + i * to.ld);
    }
  });
}

void orthogonalize(const NewtonSchulz& ns, const Bf16Matrix& x, float* workspace) {
  if (x.rows == 0 || x.cols == 0) {
    return;
  }
  const FloatMode mode;
  const std::optional<double> factor = inverse_norm(x, ns.eps);
  if (!factor) {
    return;
  }
  const Wide wide(x);
  auto* const memory = reinterpret_cast<BFloat16*>(workspace);
  Bf16Matrix now{memory, wide.rows, wide.cols, wide.cols};
  Bf16Matrix next{memory + wide.numel(), wide.rows, wide.cols, wide.cols};
  const bool is_tall = x.rows > x.cols;
  const auto tall = [](const Bf16Matrix& m) { return Bf16Matrix{m.x, m.cols, m.rows, m.rows}; };
  const size_t steps = ns.coefficients.size();
  // The first segment multiplies by what is no power of two: rounding X would move its small
  // singular values, which the steps enlarge, more than all later roundings.
  double scale = steps == 0 || *factor == 0.0 ? 1.0 : *factor / std::exp2(std::ilogb(*factor));
  load(x, *factor / scale, is_tall ? tall(next) : now);
  if (is_tall) {
    transpose(tall(next), now);
  }
  const auto segment_end = [&](size_t first) {
    return cpu::segment_end(ns, first, wide.rows == wide.cols, kMostGrowth);
  };
  for (size_t i = 0; i < steps; std::swap(now, next)) {
    size_t end = segment_end(i);
    // The last segment is as long as it may be: R's errors matter most where steps are still to
    // come.
    while (end - i > 1 && end < steps && segment_end(end - 1) == steps) {
      --end;
    }
    segment(ns, i, end, std::min(x.rows, x.cols), scale, now, next, memory + 2 * wide.numel());
    scale = 1.0;
    i = end;
  }
  if (is_tall) {
    transpose(now, tall(next));
  }
  store(is_tall ? tall(next) : now, x);
}

}  // namespace
}  // namespace bf16

bool orthogonalizes(at::ScalarType dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && bf16::kernels_of_cpu() != nullptr);
}

int64_t orthogonalize_workspace(const Bf16Matrix& x) {
  const bf16::Wide wide(x);
  const int64_t squares = wide.rows == wide.cols ? 2 : 4;
  return wide.numel() + squares * wide.rows * wide.rows / 2 + wide.rows;
}

int64_t orthogonalize_workspace(const std::vector<Bf16Matrix>& matrices) {
  return workspace_of_all(matrices);
}

void orthogonalize(const NewtonSchulz& ns, const std::vector<Bf16Matrix>& matrices,
                   float* workspace) {
  orthogonalize_all(matrices, workspace, [&](const Bf16Matrix& matrix, float* memory) {
    bf16::orthogonalize(ns, matrix, memory);
  });
}

}  // namespace torchopt_ext::cpu

// Newton-Schulz iterations on bf16 matrices, by products with sums in fp32.
#include "cpu/newton_schulz.h"
#include "cpu/product_bf16.h"

namespace torchopt_ext::cpu {
namespace bf16 {
namespace {

// Rounding errors of R are about 2e-3. They enter the next step's Q multiplied by b, next to a.
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

// c = alpha a b + the addends' sum, of symmetric matrices that commute
void multiply_squares(int64_t m, BFloat16* c, const BFloat16* a, const BFloat16* b, float alpha,
                      float beta, const BFloat16* addend, float other_beta = 0.0f,
                      const BFloat16* other = nullptr) {
  multiply({.a = {a, m, false},
            .b = {b, m, true},
            .c = c,
            .ldc = m,
            .rows = m,
            .cols = m,
            .depth = m,
            .symmetric = true,
            .alpha = alpha,
            .addend = {addend, other},
            .beta = {beta, other_beta}});
}

// Runs the steps [first, last) of a segment (newton_schulz.h) on a wide matrix. Every Q is held as
// a I + P, with only P in bf16.
void segment(const NewtonSchulz& ns, size_t first, size_t last, const Bf16Matrix& from,
             const Bf16Matrix& to, BFloat16* workspace) {
  const int64_t m = from.rows;
  BFloat16* const r = workspace;
  BFloat16* all = r + m * m;  // with `identity` the product of all Q
  BFloat16* other = all + m * m;
  BFloat16* const q = other + m * m;
  multiply({.a = {from.x, from.ld, false},
            .b = {from.x, from.ld, true},
            .c = r,
            .ldc = m,
            .rows = m,
            .cols = m,
            .depth = from.cols,
            .symmetric = true});
  float identity = 1.0f;
  for (size_t step = first; step < last; ++step) {
    const std::array<float, 3> abc = {static_cast<float>(ns.coefficients[step][0]),
                                      static_cast<float>(ns.coefficients[step][1]),
                                      static_cast<float>(ns.coefficients[step][2])};
    BFloat16* const now = step == first ? all : q;
    multiply_squares(m, now, r, r, abc[2], abc[1], r);
    if (step > first) {  // (a I + q) (identity I + all)
      multiply_squares(m, other, q, all, 1.0f, abc[0], all, identity, q);
      std::swap(all, other);
    }
    identity *= abc[0];
    if (step + 1 < last) {  // R = (a I + now)^2 R
      multiply_squares(m, other, now, r, 1.0f, abc[0], r);
      multiply_squares(m, r, other, now, 1.0f, abc[0], other);
    }
  }
  multiply({.a = {all, m, false},
            .b = {from.x, from.ld, false},
            .c = to.x,
            .ldc = to.ld,
            .rows = m,
            .cols = from.cols,
            .depth = m,
            .symmetric = false,
            .addend = {from.x, nullptr},
            .beta = {identity, 0.0f}});
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
  load(x, *factor, is_tall ? tall(next) : now);
  if (is_tall) {
    transpose(tall(next), now);
  }
  for (size_t i = 0; i < ns.coefficients.size(); std::swap(now, next)) {
    const size_t end = segment_end(ns, i, x.rows == x.cols, kMostGrowth);
    segment(ns, i, end, now, next, memory + 2 * wide.numel());
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
  const int64_t squares = x.rows == x.cols ? 2 : 4;
  return (2 * wide.numel() + squares * wide.rows * wide.rows) / 2;
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

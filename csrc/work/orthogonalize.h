// Newton-Schulz iterations: the matrix stage of Muon, docs/numerics.md section 12.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <vector>

#include "kernels/dtype.h"

namespace torchopt_ext {

struct Product;

struct NewtonSchulz {
  // A step computes X = a X + b (X X^T) X + c (X X^T)^2 X, for X with at least as many columns as
  // rows, or its transpose.
  std::vector<std::array<double, 3>> coefficients;  // (a, b, c) of each step
  double eps = 1e-7;                                // X starts as X / max(|X|, eps)
  // If not empty, takes [batch, m, n] and returns what directions become instead.
  std::function<at::Tensor(const at::Tensor&)> instead;
};

// Makes triples of an operator's coefficients. Raises unless there are three for each step.
NewtonSchulz newton_schulz_of(at::ArrayRef<double> coefficients, double eps);

// Orthogonalizes each matrix of [batch, m, n] by torch's products, in the batch's dtype, or as
// `ns.instead` does.
at::Tensor orthogonalized(const NewtonSchulz& ns, const at::Tensor& batch);

namespace cpu {

template <class T>
struct MatrixOf {
  T* x;
  int64_t rows;
  int64_t cols;
  int64_t ld;  // elements from one row to the next
};
using Matrix = MatrixOf<float>;
using Bf16Matrix = MatrixOf<BFloat16>;

using Multiply = std::function<void(const Product&)>;
void multiply(const Product& p);  // cpu/multiply.h

// Returns how many floats of workspace a matrix needs.
int64_t orthogonalize_workspace(const Matrix& matrix);
int64_t orthogonalize_workspace(const Bf16Matrix& matrix);
// Orthogonalizes a matrix in place, on all threads, or inside a parallel region on the calling one.
// `run` computes the products; a test counts them instead.
void orthogonalize(const NewtonSchulz& ns, const Matrix& matrix, float* workspace,
                   const Multiply& run = multiply);

// The same for several matrices. Many small ones are shared out among the threads.
int64_t orthogonalize_workspace(const std::vector<Matrix>& matrices);
int64_t orthogonalize_workspace(const std::vector<Bf16Matrix>& matrices);
void orthogonalize(const NewtonSchulz& ns, const std::vector<Matrix>& matrices, float* workspace);
void orthogonalize(const NewtonSchulz& ns, const std::vector<Bf16Matrix>& matrices,
                   float* workspace);

// Returns whether these functions take matrices of a dtype: of float32, and of bfloat16 if the CPU
// has instructions for such products and torch may use AVX-512.
bool orthogonalizes(at::ScalarType dtype);

}  // namespace cpu
}  // namespace torchopt_ext

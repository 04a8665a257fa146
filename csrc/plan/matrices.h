// Matrices that lie in one tensor, and their orthogonalization in place.
#pragma once

#include <vector>

#include "work/orthogonalize.h"

namespace torchopt_ext {

// A matrix in a tensor: element (i, j) is number first + i * stride + j in storage order.
struct Matrix {
  int64_t first;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  double lr_scale;  // multiplies the learning rate, not the weight decay
};

// Returns the floats of workspace that orthogonalize_matrices() needs: 0 where torch multiplies.
int64_t orthogonalize_workspace(const NewtonSchulz& newton_schulz,
                                const std::vector<Matrix>& matrices, at::Device device,
                                at::ScalarType dtype);

// Orthogonalizes matrices of a flat buffer: of float32 and float64 on a CPU by this library's
// products in float32, of bfloat16 by its products where the CPU has instructions for them, others
// by torch's products in the buffer's dtype, and all by the group's function if there is one. An
// undefined workspace is allocated.
void orthogonalize_matrices(const NewtonSchulz& newton_schulz, std::vector<Matrix> matrices,
                            const at::Tensor& buffer, at::Tensor workspace = {});

}  // namespace torchopt_ext

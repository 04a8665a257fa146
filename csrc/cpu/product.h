// What a product of fp32 matrices computes (kernel_table.h): docs/numerics.md section 12. Those of
// bf16 (product_bf16.h) have the same operands and blocks.
#pragma once

#include <cstdint>

namespace torchopt_ext {

// A matrix that is read. Element (i, j) lies at x[i * ld + j], or at x[j * ld + i] if `transposed`.
template <class T>
struct OperandOf {
  const T* x;
  int64_t ld;
  bool transposed;
};
using Operand = OperandOf<float>;

// c = a b, or with `addend` c = diagonal I + (beta addend + alpha (a b)).
struct Product {
  Operand a;  // rows x depth
  Operand b;  // depth x cols
  float* c;   // shares no memory with the others
  int64_t ldc;
  int64_t rows;
  int64_t cols;
  int64_t depth;
  bool symmetric;                 // computes the upper half of c and mirrors it
  const float* addend = nullptr;  // stored like c
  float alpha = 0.0f;
  float beta = 0.0f;
  float diagonal = 0.0f;
};

// The part of c that one call computes. In a symmetric product both ranges are equal, or the
// columns come after the rows, and the call also writes the mirror image.
struct Block {
  int64_t first_row;
  int64_t last_row;
  int64_t first_col;
  int64_t last_col;
};

// Blocks have at most kBlockCols columns: kPanelDepth rows of b then fit into the L2 cache. The
// sizes are multiples of all tiles' (product_kernel.h).
inline constexpr int64_t kBlockCols = 384;
inline constexpr int64_t kPanelDepth = 256;
inline constexpr int64_t kMaxTileRows = 16;
// What product() needs, at an address that is a multiple of 64 bytes.
struct alignas(64) ProductScratch {
  float b[kPanelDepth * kBlockCols];
  float a[kPanelDepth * kMaxTileRows];
};

}  // namespace torchopt_ext

// Products of bf16 matrices with sums in fp32, on CPUs with instructions for them. Their results
// depend neither on the threads nor on how a result is cut into blocks.
#pragma once

#include <cstdint>

#include "cpu/product.h"
#include "kernels/dtype.h"

namespace torchopt_ext {

// Rows and columns come in multiples of kBf16Tile. Rows of a matrix follow each other at a distance
// of `ld` elements, a multiple of kBf16Tile, and start at multiples of 64 bytes.
inline constexpr int64_t kBf16Tile = 32;

// c = alpha a b + the sum of beta[i] addend[i], rounded to bf16 at the end.
struct Bf16Product {
  OperandOf<BFloat16> a;  // rows x depth, not transposed
  OperandOf<BFloat16> b;  // depth x cols
  BFloat16* c = nullptr;  // shares no memory with a and b
  int64_t ldc = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t depth = 0;
  bool symmetric = false;     // computes the upper half of c and mirrors it
  float* diagonal = nullptr;  // if symmetric: takes c's diagonal, not rounded
  float alpha = 1.0f;
  const BFloat16* addend[2] = {nullptr, nullptr};  // stored like c; a single one is addend[0]
  float beta[2] = {0.0f, 0.0f};
};

// Blocks have at most kBf16BlockRows x kBf16BlockCols elements, in a symmetric product also blocks
// of which a part lies below the diagonal. Their sums, and kBf16PanelDepth rows of b beside them,
// fit into an L2 cache of 1 MB.
inline constexpr int64_t kBf16BlockRows = 512;
inline constexpr int64_t kBf16BlockCols = 128;
inline constexpr int64_t kBf16PanelDepth = 2048;
struct alignas(64) Bf16Scratch {
  float c[kBf16BlockRows * kBf16BlockCols];
  BFloat16 b[kBf16PanelDepth * kBf16BlockCols];
};

struct Bf16Kernels {
  void (*product)(const Bf16Product&, const Block&, Bf16Scratch&);
  // Transposes rows x cols elements, whole tiles of them, into rows of `ldt`.
  void (*transpose)(const BFloat16* from, int64_t ldf, int64_t rows, int64_t cols, BFloat16* to,
                    int64_t ldt);
};

// Returns the kernels of this CPU, with AMX's tiles or, if it has none, AVX-512's dot products of
// bf16; null if it has neither.
const Bf16Kernels* bf16_kernels(bool with_tiles = true);

}  // namespace torchopt_ext

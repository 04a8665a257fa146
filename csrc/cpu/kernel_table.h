// The CPU kernels of one instruction set. kernels.cpp is compiled once per instruction set and
// exports one table. kernel_table.cpp selects the table to use.
#pragma once

#include "cpu/product.h"
#include "kernels/digest.h"
#include "kernels/exact_accumulator.h"
#include "kernels/kinds.h"
#include "kernels/trace.h"

namespace torchopt_ext {

struct KernelTable {
  const char* name;  // "default", "avx2" or "avx512"

  // Pass B on elements [begin, end) of a tensor, indexed by Kind. Unless `change` is null,
  // writes the change of each stored weight there, in the tensor's compute type, and returns how
  // many weights did not change although their update was not 0.
  int64_t (*update[kKinds])(const TensorScalars&, const TensorWork&, const StepOptions&,
                            int64_t begin, int64_t end, void* change);
  // Pass B with tracking: update by `table`, on a chunk. Returns the chunk's trace.
  ChunkTrace (*traced)(const KernelTable& table, const TensorScalars&, const TensorWork&,
                       const StepOptions&, int64_t begin, int64_t end);

  // Updates the moving average of elements [begin, end) of a tensor's weights, where `weight` is
  // the weight of the new values. The second one is of float64 tensors.
  void (*average[2])(const TensorWork&, const StepOptions&, int64_t begin, int64_t end,
                     double weight);

  // Pass A on a chunk (make_chunks), indexed by DType: adds the squares of n elements. `row_length`
  // is the tensor's. Prefetches `next`, which pass A reads soon, unless it is null.
  void (*add_squares[kDTypes])(const void* x, int64_t n, int64_t row_length, const void* next,
                               ExactAccumulator& acc);
  // Returns the sum of squares of at most kBlockElements elements, which lie in the cache.
  double (*block_sum[kDTypes])(const void* x, int64_t n);

  // Indexed by the DTypes of `to` and `from`, which may be the same memory. Null if only one DType
  // is float64. `past_caches`: for copies that are larger than the caches.
  void (*scaled_copy[kDTypes][kDTypes])(void* to, const void* from, double factor, int64_t n,
                                        bool past_caches);

  // Returns the digest of elements [begin, end) of an array.
  uint64_t (*digest)(const DigestArray&, int64_t begin, int64_t end);

  // Computes a block of a product of matrices.
  void (*product)(const Product&, const Block&, ProductScratch&);
  // to[i] = from[i] * factor, rounded to double and then to float; `to` may be `from`.
  void (*scale)(float* to, const float* from, double factor, int64_t n);
};

const KernelTable& default_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();

// Returns the table for at::get_cpu_capability(), which ATEN_CPU_CAPABILITY can lower.
const KernelTable& kernels();

}  // namespace torchopt_ext

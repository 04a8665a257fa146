// The CPU kernels of one instruction set. kernels.cpp is compiled once for each, exporting one
// table; kernel_table.cpp picks among them.
#pragma once

#include "kernels/adam.h"
#include "kernels/exact_accumulator.h"
#include "kernels/trace.h"

namespace torchopt_ext {

struct KernelTable {
  const char* name;  // "default", "avx2" or "avx512"

  // Pass B on elements [begin, end) of a tensor, by its kind. `past_caches`: the parameters beside
  // masters are stored past the caches.
  void (*adam[kAdamKinds])(const TensorScalars&, const TensorWork&, const StepOptions&,
                           int64_t begin, int64_t end, bool past_caches);
  // The same, by its kind, too. Notes what was added to each weight as it is stored, in the type
  // the tensor is computed in. Returns how many did not change although something was to be added.
  int64_t (*adam_traced[kAdamKinds])(const TensorScalars&, const TensorWork&, const StepOptions&,
                                     int64_t begin, int64_t end, bool past_caches, void* change);
  // The digest of what pass B stored of elements [begin, end): whole groups, of 8-bit moments.
  uint64_t (*digest)(const TensorWork&, int64_t begin, int64_t end);

  // Pass A, by DType; `next`, which may be null, is what will be read soon. Adds the squares of
  // rows of kShortRow or more elements, and of at most kBlockElements elements of shorter rows.
  void (*add_rows[kDTypes])(const void* x, int64_t rows, int64_t length, const void* next,
                            ExactAccumulator& acc);
  void (*add_short_rows[kDTypes])(const void* x, int64_t n, const void* next,
                                  ExactAccumulator& acc);
  // The sum of squares of at most kBlockElements elements, in cache.
  double (*block_sum[kDTypes])(const void* x, int64_t n);

  // By DType of `to`, which may be `from`, and of `from`; null where one is float64 and the other
  // is not. `past_caches`: for more than the caches hold.
  void (*scaled_copy[kDTypes][kDTypes])(void* to, const void* from, double factor, int64_t n,
                                        bool past_caches);
};

const KernelTable& default_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();

// The table of at::get_cpu_capability(), which ATEN_CPU_CAPABILITY can lower.
const KernelTable& kernels();

}  // namespace torchopt_ext

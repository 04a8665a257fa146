// The CPU kernels of one instruction set. kernels.cpp is compiled once for each, exporting one
// table; kernel_table.cpp picks among them.
#pragma once

#include "kernels/adam_args.h"
#include "kernels/exact_accumulator.h"

namespace torchopt_ext {

struct KernelTable {
  const char* name;  // "default", "avx2" or "avx512"

  // n elements; max_exp_avg_sq is null without amsgrad.
  void (*adam_float)(const AdamScalars<float>&, float* param, const float* grad, float* exp_avg,
                     float* exp_avg_sq, float* max_exp_avg_sq, int64_t n);
  void (*adam_double)(const AdamScalars<double>&, double* param, const double* grad,
                      double* exp_avg, double* exp_avg_sq, double* max_exp_avg_sq, int64_t n);

  // By DType; at most kBlockElements elements.
  double (*block_sum_of_squares[kDTypes])(const void* x, int64_t n);
  void (*exact_sum_of_squares[kDTypes])(const void* x, int64_t n, ExactAccumulator& acc);

  // By DType; 16-bit types only.
  void (*widen[kDTypes])(const void* from, float* to, int64_t n);
  void (*narrow[kDTypes])(const float* from, void* to, int64_t n);
};

const KernelTable& default_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();

// The table of at::get_cpu_capability(), which ATEN_CPU_CAPABILITY can lower.
const KernelTable& kernels();

}  // namespace torchopt_ext

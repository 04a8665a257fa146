// Launches of the CUDA kernels. Free of torch, so that nvcc does not have to parse it; pointers
// are to device memory and `stream` is a cudaStream_t. Launch errors are the caller's to check.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/bodies.h"

namespace torchopt_ext {

void launch_sum_of_squares(const SumOfSquaresArgs& args, int64_t chunks, cudaStream_t stream);
void launch_accumulator_total(const int64_t* accumulator, double* total, cudaStream_t stream);
void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream);
// Counts the steps, then updates.
void launch_adam(const AdamArgs& args, int64_t chunks, cudaStream_t stream);
void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream);

}  // namespace torchopt_ext

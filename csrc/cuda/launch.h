// Launches of the CUDA kernels. Free of torch, so that nvcc does not have to parse it; pointers
// are to device memory and `stream` is a cudaStream_t. Launch errors are the caller's to check.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/adam_body.h"
#include "cuda/scaled_copy_body.h"
#include "cuda/sum_of_squares_body.h"
#include "kernels/schedule.h"

namespace torchopt_ext {

void launch_sum_of_squares(const SumOfSquaresArgs& args, cudaStream_t stream);
void launch_accumulator_normalize(int64_t* accumulator, cudaStream_t stream);
void launch_accumulator_total(const int64_t* accumulator, double* total, cudaStream_t stream);
void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream);
void launch_loss_scale_update(Control* control, const void* found_inf, DType found_inf_dtype,
                              float* scale, cudaStream_t stream);

// Pass B, in this order: launch_adam for each type that tensors are computed in, the last only if
// the options ask for traces.
void launch_prepare(const AdamArgs& args, cudaStream_t stream);
template <class T>  // float or double
void launch_adam(const AdamArgs& args, cudaStream_t stream);
void launch_sum_traces(const AdamArgs& args, cudaStream_t stream);

void launch_scaled_copy(const ScaledCopyArgs& args, cudaStream_t stream);

void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream);

}  // namespace torchopt_ext

// Registers the step operators for CUDA tensors.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "schedule_args.h"
#include "step_ops.h"

namespace torchopt_ext {
namespace {

// A negative step is a caller's error that only the host could see; it counts as warm-up.
at::Tensor lr_factor_tensor(const at::Tensor& step, int64_t warmup_steps, int64_t stable_steps,
                            int64_t decay_steps, c10::string_view decay_type, double min_factor,
                            int64_t generation) {
  const Schedule schedule =
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation);
  TORCH_CHECK(step.scalar_type() == at::kLong, "step has dtype ", step.scalar_type(),
              ", expected int64");
  const c10::cuda::CUDAGuard guard(step.device());
  const at::Tensor steps = step.contiguous();
  at::Tensor factors = at::empty(step.sizes(), step.options().dtype(at::kDouble));
  if (steps.numel() > 0) {
    launch_lr_factor(schedule, steps.const_data_ptr<int64_t>(), factors.data_ptr<double>(),
                     steps.numel(), at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return factors;
}

}  // namespace

TORCH_LIBRARY_IMPL(torchopt_ext, CUDA, m) {
  register_step_ops(m);
  m.impl("lr_factor.tensor", lr_factor_tensor);
}

}  // namespace torchopt_ext

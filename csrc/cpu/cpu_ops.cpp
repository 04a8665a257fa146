// Registers the step operators for CPU tensors.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/float_mode.h"
#include "schedule_args.h"
#include "step_ops.h"

namespace torchopt_ext {
namespace {

at::Tensor lr_factor_tensor(const at::Tensor& step, int64_t warmup_steps, int64_t stable_steps,
                            int64_t decay_steps, c10::string_view decay_type, double min_factor,
                            int64_t generation) {
  const Schedule schedule =
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation);
  TORCH_CHECK(step.scalar_type() == at::kLong, "step has dtype ", step.scalar_type(),
              ", expected int64");
  const at::Tensor steps = step.contiguous();
  at::Tensor factors = at::empty(step.sizes(), step.options().dtype(at::kDouble));
  const auto* from = steps.const_data_ptr<int64_t>();
  auto* to = factors.data_ptr<double>();
  const FloatMode mode;
  for (int64_t i = 0; i < steps.numel(); ++i) {
    TORCH_CHECK_VALUE(from[i] >= 0, "step ", i, " is ", from[i], ", expected 0 or more");
    to[i] = lr_factor(schedule, from[i]);
  }
  return factors;
}

}  // namespace

TORCH_LIBRARY_IMPL(torchopt_ext, CPU, m) {
  register_step_ops(m);
  m.impl("lr_factor.tensor", lr_factor_tensor);
}

}  // namespace torchopt_ext

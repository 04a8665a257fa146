// lr_factor: learning-rate factor of the warmup-stable-decay family after `step` steps.
// lr_factor.tensor: the same for every element of an int64 tensor, as float64 on its device.
#include <ATen/ops/empty_like.h>

#include "cpu/float_mode.h"
#include "ops/operator.h"
#include "ops/operators.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

Schedule make_schedule(int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                       c10::string_view decay_type, double min_factor, int64_t generation) {
  TORCH_CHECK_VALUE(warmup_steps >= 0, "warmup_steps is ", warmup_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(stable_steps >= 0, "stable_steps is ", stable_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(decay_steps >= 0, "decay_steps is ", decay_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(min_factor >= 0.0 && min_factor <= 1.0, "min_factor is ", min_factor,
                    ", expected 0 to 1");
  TORCH_CHECK_VALUE(generation == 1 || generation == 2, "generation is ", generation,
                    ", expected 1 or 2");
  DecayType type = DecayType::kLinear;
  if (decay_type == "sqrt") {
    type = DecayType::kSqrt;
  } else if (decay_type == "cosine") {
    type = DecayType::kCosine;
  } else {
    TORCH_CHECK_VALUE(decay_type == "linear", "decay_type is '", decay_type,
                      "', expected 'linear', 'sqrt' or 'cosine'");
  }
  return {bounded_steps(warmup_steps),
          bounded_steps(stable_steps),
          bounded_steps(decay_steps),
          type,
          min_factor,
          static_cast<int>(generation)};
}

}  // namespace

double lr_factor_op(int64_t step, int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                    c10::string_view decay_type, double min_factor, int64_t generation) {
  TORCH_CHECK_VALUE(step >= 0, "step is ", step, ", expected 0 or more");
  const FloatMode mode;
  return lr_factor(
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation),
      step);
}

namespace {

at::Tensor lr_factor_tensor(const at::Tensor& step, int64_t warmup_steps, int64_t stable_steps,
                            int64_t decay_steps, c10::string_view decay_type, double min_factor,
                            int64_t generation) {
  const Schedule schedule =
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation);
  TORCH_CHECK(step.scalar_type() == at::kLong, "step has dtype ", step.scalar_type(),
              ", expected int64");
  return passes_on(step.device()).lr_factors(schedule, step.contiguous());
}

at::Tensor lr_factor_meta(const at::Tensor& step, int64_t, int64_t, int64_t, c10::string_view,
                          double, int64_t) {
  return at::empty_like(step, step.options().dtype(at::kDouble), at::MemoryFormat::Contiguous);
}

std::string schedule_arguments(const std::string& step) {
  return "(" + step +
         " step, *, int warmup_steps, int stable_steps, int decay_steps, "
         "str decay_type=\"linear\", float min_factor=0.0, int generation=1)";
}
const Operator kLrFactorTensor("lr_factor.tensor", schedule_arguments("Tensor") + " -> Tensor",
                               lr_factor_tensor, torch::CppFunction(lr_factor_meta));
const Operator kLrFactor("lr_factor", schedule_arguments("int") + " -> float", lr_factor_op);

}  // namespace
}  // namespace torchopt_ext

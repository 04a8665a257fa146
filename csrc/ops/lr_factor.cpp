// lr_factor: learning-rate factor of the warmup-stable-decay family after `step` steps.
// lr_factor.tensor: the same for every element of an int64 tensor, as float64 on its device.
#include <ATen/ops/empty_like.h>
#include <torchopt_ext/lr_schedule.h>

#include "cpu/float_mode.h"
#include "ops/operator.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

Schedule checked(const LRSchedule& s) {
  TORCH_CHECK_VALUE(s.warmup_steps >= 0, "warmup_steps is ", s.warmup_steps,
                    ", expected 0 or more");
  TORCH_CHECK_VALUE(s.stable_steps >= 0, "stable_steps is ", s.stable_steps,
                    ", expected 0 or more");
  TORCH_CHECK_VALUE(s.decay_steps >= 0, "decay_steps is ", s.decay_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(s.min_factor >= 0.0 && s.min_factor <= 1.0, "min_factor is ", s.min_factor,
                    ", expected 0 to 1");
  TORCH_CHECK_VALUE(s.generation == 1 || s.generation == 2, "generation is ", s.generation,
                    ", expected 1 or 2");
  DecayType type = DecayType::kLinear;
  if (s.decay_type == "sqrt") {
    type = DecayType::kSqrt;
  } else if (s.decay_type == "cosine") {
    type = DecayType::kCosine;
  } else {
    TORCH_CHECK_VALUE(s.decay_type == "linear", "decay_type is '", s.decay_type,
                      "', expected 'linear', 'sqrt' or 'cosine'");
  }
  return {bounded_steps(s.warmup_steps),
          bounded_steps(s.stable_steps),
          bounded_steps(s.decay_steps),
          type,
          s.min_factor,
          static_cast<int>(s.generation)};
}

}  // namespace

double lr_factor(int64_t step, const LRSchedule& schedule) {
  TORCH_CHECK_VALUE(step >= 0, "step is ", step, ", expected 0 or more");
  const FloatMode mode;
  return lr_factor(checked(schedule), step);
}

namespace {

at::Tensor lr_factor(const at::Tensor& step, const LRSchedule& schedule) {
  const Schedule all = checked(schedule);
  TORCH_CHECK(step.scalar_type() == at::kLong, "step has dtype ", dtype_name(step.scalar_type()),
              ", expected int64");
  return passes_on(step.device()).lr_factors(all, step.contiguous());
}

// `step` is a number or a tensor.
template <class Step>
auto lr_factor_op(Step step, int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                  c10::string_view decay_type, double min_factor, int64_t generation) {
  return lr_factor(step, LRSchedule{warmup_steps, stable_steps, decay_steps,
                                    std::string(decay_type), min_factor, generation});
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
                               lr_factor_op<const at::Tensor&>, torch::CppFunction(lr_factor_meta));
const Operator kLrFactor("lr_factor", schedule_arguments("int") + " -> float",
                         lr_factor_op<int64_t>);

}  // namespace
}  // namespace torchopt_ext

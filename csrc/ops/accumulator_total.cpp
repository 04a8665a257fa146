// accumulator_total: returns the accumulator's sum, rounded once to float64; NaN or infinity if the
// accumulator counted one.
#include <ATen/ops/empty.h>

#include "ops/operator.h"
#include "plan/tensor_checks.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

at::Tensor accumulator_total_op(const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  return passes_on(accumulator.device()).accumulator_total(accumulator);
}

at::Tensor accumulator_total_meta(const at::Tensor& accumulator) {
  return at::empty({}, accumulator.options().dtype(at::kDouble));
}

const Operator kAccumulatorTotal("accumulator_total", "(Tensor accumulator) -> Tensor",
                                 accumulator_total_op, torch::CppFunction(accumulator_total_meta));

}  // namespace
}  // namespace torchopt_ext

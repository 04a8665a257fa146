// accumulator_total: returns the accumulator's sum, rounded once to float64; NaN or infinity if the
// accumulator counted one.
#include "ops/operator.h"
#include "plan/step_checks.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

at::Tensor accumulator_total_op(const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  return passes_on(accumulator.device()).accumulator_total(accumulator);
}

const Operator kAccumulatorTotal("accumulator_total", "(Tensor accumulator) -> Tensor",
                                 accumulator_total_op);

}  // namespace
}  // namespace torchopt_ext

// control_update_: computes norm, clip factor, overflow flag and skip decision from the (reduced)
// accumulator and writes them to the control block (float64, fields as in kernels/control.h).
#include "ops/operator.h"
#include "plan/tensor_checks.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  const Decision decision{accumulator, grad_scale, found_inf};
  check_decision(control, decision);
  passes_on(control.device()).control_update(control, decision);
  bump_version(control);
}

const Operator kControlUpdate(
    "control_update_",
    "(Tensor(a!) control, Tensor accumulator, Tensor? grad_scale=None, Tensor? "
    "found_inf=None) -> ()",
    control_update_);

}  // namespace
}  // namespace torchopt_ext

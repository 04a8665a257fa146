// control_update_: computes norm, clip factor, overflow flag and skip decision from the (reduced)
// accumulator and writes them to the control block (float64, fields as in kernels/control.h).
#include "ops/operator.h"
#include "ops/operators.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"

namespace torchopt_ext {

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  check_control(control);
  check_accumulator(accumulator);
  const at::Device device = control.device();
  TORCH_CHECK(device == accumulator.device(), "control is on ", device, ", the accumulator on ",
              accumulator.device());
  if (grad_scale) {
    check_scalar(*grad_scale, "grad_scale", device);
  }
  if (found_inf) {
    check_scalar(*found_inf, "found_inf", device);
  }
  passes_on(device).control_update(control, accumulator, grad_scale, found_inf);
  bump_version(control);
}

const Operator kControlUpdate(
    "control_update_",
    "(Tensor(a!) control, Tensor accumulator, Tensor? grad_scale=None, Tensor? "
    "found_inf=None) -> ()",
    control_update_);

}  // namespace torchopt_ext

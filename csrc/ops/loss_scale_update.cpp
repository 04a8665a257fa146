// loss_scale_update_: after a step under a gradient scaler, copies `scale` (one float32 element)
// into the control block, backs it off or grows it by the block's settings, and writes it back.
#include "ops/operator.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

void loss_scale_update_(const at::Tensor& control, const at::Tensor& found_inf,
                        const at::Tensor& scale) {
  check_control(control);
  const at::Device device = control.device();
  check_scalar(scale, "scale", device);
  check_scalar(found_inf, "found_inf", device, /*or_double=*/true);
  passes_on(device).loss_scale_update(control, found_inf, scale);
  bump_version(control);
  bump_version(scale);
}

const Operator kLossScaleUpdate("loss_scale_update_",
                                "(Tensor(a!) control, Tensor found_inf, Tensor(b!) scale) -> ()",
                                loss_scale_update_);

}  // namespace
}  // namespace torchopt_ext

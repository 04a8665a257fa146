// The CUDA back end of a build without CUDA.
#include "cuda/passes.h"

namespace torchopt_ext::cuda {
namespace {

[[noreturn]] void raise() {
  TORCH_CHECK(false, "torchopt_ext was built without support for cuda tensors");
}

}  // namespace

void sum_of_squares(const WorkList& /*work*/, const at::Tensor& /*accumulator*/,
                    bool /*normalize*/) {
  raise();
}
void clear(const at::Tensor& /*accumulator*/) { raise(); }
at::Tensor accumulator_total(const at::Tensor& /*accumulator*/) { raise(); }
void control_update(const at::Tensor& /*control*/, const at::Tensor& /*accumulator*/,
                    const std::optional<at::Tensor>& /*grad_scale*/,
                    const std::optional<at::Tensor>& /*found_inf*/) {
  raise();
}
void loss_scale_update(const at::Tensor& /*control*/, const at::Tensor& /*found_inf*/,
                       const at::Tensor& /*scale*/) {
  raise();
}
void adam(const WorkList& /*work*/, const std::vector<GroupHyper>& /*groups*/,
          const at::Tensor& /*control*/, const Traces& /*traces*/) {
  raise();
}
void scaled_copy(const WorkList& /*work*/, const at::Tensor& /*control*/, bool /*unscale*/) {
  raise();
}
at::Tensor lr_factors(const Schedule& /*schedule*/, const at::Tensor& /*steps*/) { raise(); }

}  // namespace torchopt_ext::cuda

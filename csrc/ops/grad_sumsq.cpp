// grad_sumsq_: pass A. Adds every gradient's sum of squares to the exact accumulator (int64[70]).
#include "ops/operator.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  const at::Device device = accumulator.device();
  WorkList work;
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < grads.size(); ++i) {
    const Label what = Label{"gradient", i};
    check_supported(grads[i], what);
    TORCH_CHECK(grads[i].device() == device, what, " is on ", grads[i].device(), ", expected ",
                device, " as the accumulator");
    kept.push_back(grads[i].is_non_overlapping_and_dense() ? grads[i] : grads[i].contiguous());
    const at::Tensor& grad = kept.back();
    TensorWork tensor{};
    tensor.memory[kGrad] = const_cast<void*>(grad.const_data_ptr());  // pass A only reads it
    tensor.numel = grad.numel();
    tensor.row_length = row_length(grad);
    tensor.layout.param = tensor.layout.grad = dtype_of(grad);
    work.tensors.push_back(tensor);
  }
  work.split_into_chunks();
  passes_on(device).sum_of_squares(work, accumulator, /*normalize=*/true);
  bump_version(accumulator);
}

const Operator kGradSumsq("grad_sumsq_", "(Tensor[] grads, Tensor(a!) accumulator) -> ()",
                          grad_sumsq_);

}  // namespace
}  // namespace torchopt_ext

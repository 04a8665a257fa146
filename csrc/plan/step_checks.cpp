#include "plan/step_checks.h"

#include <cmath>

#include "kernels/control.h"
#include "kernels/exact_accumulator.h"
#include "plan/tensor_fields.h"

namespace torchopt_ext {
namespace {

void check_block(const at::Tensor& tensor, const char* what, at::ScalarType dtype, int64_t numel,
                 std::optional<at::Device> device) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_meta(), what, " has layout ",
              tensor.layout(), " on ", tensor.device(), ", expected a dense tensor with memory");
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous(),
              what, " is ", tensor.scalar_type(), tensor.sizes(), ", expected contiguous ", dtype,
              "[", numel, "]");
  TORCH_CHECK(!device || tensor.device() == *device, what, " is on ", tensor.device(),
              ", expected ", *device);
  TORCH_CHECK(address(*tensor.unsafeGetTensorImpl()) != nullptr, what,
              " has had its storage freed");
}

}  // namespace

void check_accumulator(const at::Tensor& accumulator, std::optional<at::Device> device) {
  check_block(accumulator, "accumulator", at::kLong, ExactAccumulator::kSize, device);
}

void check_control(const at::Tensor& control, std::optional<at::Device> device) {
  check_block(control, "control", at::kDouble, kControlSize, device);
}

void check_scalar(const at::Tensor& tensor, const char* what, at::Device device, bool or_double) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.numel() == 1 && tensor.device() == device &&
                  (dtype == at::kFloat || (or_double && dtype == at::kDouble)) &&
                  address(*tensor.unsafeGetTensorImpl()) != nullptr,
              what, " is not one float32", or_double ? " or float64" : "", " element on ", device,
              ", or has had its storage freed");
}

void check_hyper(const AdamHyper& hyper) {
  // lr may be below 0: schedules that end at 0 may miss 0 by a rounding.
  TORCH_CHECK_VALUE(!std::isnan(hyper.lr), "Invalid learning rate: ", hyper.lr);
  // A NaN fails each of the comparisons.
  TORCH_CHECK_VALUE(hyper.beta1 >= 0.0 && hyper.beta1 < 1.0,
                    "Invalid beta parameter at index 0: ", hyper.beta1);
  TORCH_CHECK_VALUE(hyper.beta2 >= 0.0 && hyper.beta2 < 1.0,
                    "Invalid beta parameter at index 1: ", hyper.beta2);
  TORCH_CHECK_VALUE(hyper.eps >= 0.0, "Invalid epsilon value: ", hyper.eps);
  TORCH_CHECK_VALUE(hyper.weight_decay >= 0.0, "Invalid weight_decay value: ", hyper.weight_decay);
}

void check_lr(const at::Tensor& lr, at::Device device) {
  TORCH_CHECK(lr.numel() == 1, "lr has ", lr.numel(), " elements, expected 1");
  TORCH_CHECK(lr.scalar_type() == at::kFloat || lr.scalar_type() == at::kDouble, "lr has dtype ",
              lr.scalar_type(), ", expected float32 or float64");
  TORCH_CHECK(lr.is_cpu() || lr.device() == device, "lr is on ", lr.device(),
              ", expected the CPU or ", device);
  TORCH_CHECK(lr.layout() == at::kStrided && address(*lr.unsafeGetTensorImpl()) != nullptr,
              "lr has no memory to be read: it has layout ", lr.layout(),
              ", or has had its storage freed");
}

}  // namespace torchopt_ext

#include "step_ops.h"

#include "plan/backend.h"
#include "plan/step_plan.h"
#include "plan/tensor_checks.h"

namespace torchopt_ext {
namespace {

void check_block(const at::Tensor& tensor, const char* what, at::ScalarType dtype, int64_t numel) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_meta(), what, " has layout ",
              tensor.layout(), " on ", tensor.device(), ", expected a dense tensor with memory");
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous(),
              what, " is ", tensor.scalar_type(), tensor.sizes(), ", expected contiguous ", dtype,
              "[", numel, "]");
}

void check_scalar(const std::optional<at::Tensor>& tensor, const char* what, at::Device device) {
  TORCH_CHECK(!tensor || (tensor->layout() == at::kStrided && tensor->scalar_type() == at::kFloat &&
                          tensor->numel() == 1 && tensor->device() == device),
              what, " is not one float32 element on ", device);
}

void check_count(size_t actual, size_t expected, const char* what) {
  TORCH_CHECK(actual == expected, "got ", actual, " ", what, " for ", expected, " parameters");
}

void adam_lists(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                at::TensorList state_steps, const at::Tensor& control, const GroupHyper& hyper) {
  check_control(control);
  check_hyper(hyper.adam);
  if (hyper.lr.defined()) {
    check_lr(hyper.lr, control.device());
  }
  const size_t n = params.size();
  check_count(grads.size(), n, "gradients");
  check_count(exp_avgs.size(), n, "exp_avgs");
  check_count(exp_avg_sqs.size(), n, "exp_avg_sqs");
  check_count(state_steps.size(), n, "state_steps");
  if (!max_exp_avg_sqs.empty()) {
    check_count(max_exp_avg_sqs.size(), n, "max_exp_avg_sqs");
  }
  std::vector<StepPlan::Entry> entries(n);
  std::vector<NamedTensor> memory;
  memory.reserve(n * (1 + StepPlan::kParts));
  for (size_t i = 0; i < n; ++i) {
    StepPlan::Entry& entry = entries[i];
    entry.position = i;
    entry.place.index = static_cast<uint32_t>(i);
    entry.tensors = {params[i],      exp_avgs[i],
                     exp_avg_sqs[i], max_exp_avg_sqs.empty() ? at::Tensor() : max_exp_avg_sqs[i],
                     at::Tensor(),   state_steps[i]};
    check_supported(params[i], describe("parameter", i));
    check_dense(params[i], describe("parameter", i));
    check_supported(grads[i], describe("gradient", i));
    memory.push_back({grads[i], describe("gradient", i), false});
    for (const at::Tensor& written : entry.tensors) {
      memory.push_back({written, describe("a tensor that is written for parameter", i), true});
    }
  }
  StepPlan plan(entries, control.device());
  check_no_overlap(memory);  // after the plan's own, whose messages are more precise
  for (size_t i = 0; i < n; ++i) {
    plan.set_gradient(i, grads[i]);
  }
  plan.update({hyper}, control);
}

}  // namespace

void check_accumulator(const at::Tensor& accumulator) {
  check_block(accumulator, "accumulator", at::kLong, ExactAccumulator::kSize);
}

void check_control(const at::Tensor& control) {
  check_block(control, "control", at::kDouble, kControlSize);
}

void check_hyper(const AdamHyper& hyper) {
  // Comparisons that a NaN fails.
  TORCH_CHECK_VALUE(hyper.lr >= 0.0, "Invalid learning rate: ", hyper.lr);
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
}

void control_update_(const at::Tensor& control, const at::Tensor& accumulator,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  check_control(control);
  check_accumulator(accumulator);
  TORCH_CHECK(control.device() == accumulator.device(), "control is on ", control.device(),
              ", the accumulator on ", accumulator.device());
  check_scalar(grad_scale, "grad_scale", control.device());
  check_scalar(found_inf, "found_inf", control.device());
  backend_for(control.device()).control_update(control, accumulator, grad_scale, found_inf);
  bump_version(control);
}

void loss_scale_update_(const at::Tensor& control, const at::Tensor& found_inf,
                        const at::Tensor& scale) {
  check_control(control);
  check_scalar(scale, "scale", control.device());
  TORCH_CHECK(
      found_inf.layout() == at::kStrided && found_inf.numel() == 1 &&
          (found_inf.scalar_type() == at::kFloat || found_inf.scalar_type() == at::kDouble) &&
          found_inf.device() == control.device(),
      "found_inf is not one float32 or float64 element on ", control.device());
  backend_for(control.device()).loss_scale_update(control, found_inf, scale);
  bump_version(control);
  bump_version(scale);
}

namespace {

void grad_sumsq_(at::TensorList grads, const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  WorkList work;
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < grads.size(); ++i) {
    const std::string what = describe("gradient", i);
    check_supported(grads[i], what);
    TORCH_CHECK(grads[i].device() == accumulator.device(), what, " is on ", grads[i].device(),
                ", expected ", accumulator.device(), " as the accumulator");
    kept.push_back(is_dense(grads[i]) ? grads[i] : grads[i].contiguous());
    const at::Tensor& grad = kept.back();
    TensorWork tensor{};
    tensor.grad = const_cast<void*>(grad.const_data_ptr());  // read only in pass A
    tensor.numel = grad.numel();
    tensor.row_length = row_length(grad);
    tensor.param_dtype = dtype_of(grad);
    tensor.grad_dtype = tensor.param_dtype;
    work.tensors.push_back(tensor);
  }
  work.chunks = make_chunks(work.tensors);
  work.cumulative = cumulative_bytes(work.tensors, work.chunks);
  backend_for(accumulator.device()).sum_of_squares(work, accumulator, /*normalize=*/true);
  bump_version(accumulator);
}

at::Tensor rounded_total(const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  return backend_for(accumulator.device()).accumulator_total(accumulator);
}

void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList state_steps,
           const at::Tensor& control, double lr, double beta1, double beta2, double eps,
           double weight_decay, bool decoupled_weight_decay, bool maximize) {
  adam_lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, control,
             {{lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize}, {}});
}

void adam_tensor_lr_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                     at::TensorList state_steps, const at::Tensor& control, const at::Tensor& lr,
                     double beta1, double beta2, double eps, double weight_decay,
                     bool decoupled_weight_decay, bool maximize) {
  adam_lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, control,
             {{0.0, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize}, lr});
}

// Under tracing all tensors are without memory and there is nothing to compute. A mixture is a
// caller's error.
void shapes_only(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  bool some_have_memory = false;
  std::string first_meta;
  const auto visit = [&](const at::Tensor& tensor, const std::string& what) {
    some_have_memory = some_have_memory || !tensor.is_meta();
    if (tensor.is_meta() && first_meta.empty()) {
      first_meta = what;
    }
  };
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (values[a].isTensor()) {
      visit(values[a].toTensor(), arguments[a].name());
    } else if (values[a].isTensorList()) {
      const auto list = values[a].toTensorVector();
      for (size_t i = 0; i < list.size(); ++i) {
        visit(list[i], arguments[a].name() + "[" + std::to_string(i) + "]");
      }
    }
  }
  TORCH_CHECK(!some_have_memory, first_meta, " is on the meta device and has no data");
  torch::jit::drop(*stack, arguments.size());
}

}  // namespace

void register_step_ops(torch::Library& m) {
  m.impl("grad_sumsq_", grad_sumsq_);
  m.impl("accumulator_total", rounded_total);
  m.impl("control_update_", control_update_);
  m.impl("loss_scale_update_", loss_scale_update_);
  m.impl("adam_", adam_);
  m.impl("adam_.tensor_lr", adam_tensor_lr_);
  m.impl("scaled_copy_", scaled_copy_);
}

// Reject sparse tensors by their position.
TORCH_LIBRARY_IMPL(torchopt_ext, SparseCPU, m) { register_step_ops(m); }
TORCH_LIBRARY_IMPL(torchopt_ext, SparseCsrCPU, m) { register_step_ops(m); }
TORCH_LIBRARY_IMPL(torchopt_ext, SparseCUDA, m) { register_step_ops(m); }
TORCH_LIBRARY_IMPL(torchopt_ext, SparseCsrCUDA, m) { register_step_ops(m); }

TORCH_LIBRARY_IMPL(torchopt_ext, Meta, m) {
  for (const char* name : {"grad_sumsq_", "control_update_", "loss_scale_update_", "adam_",
                           "adam_.tensor_lr", "scaled_copy_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&shapes_only>());
  }
}

}  // namespace torchopt_ext

// adam_: pass B. One Adam or AdamW step over lists of tensors; max_exp_avg_sqs is empty without
// amsgrad. Reads grad_factor, lr_factor and skip from the control block. Does not write gradients.
// adam_.tensor_lr: the same with the learning rate in a one-element tensor, on the CPU or the
// parameters' device.
#include <type_traits>

#include "ops/operator.h"
#include "plan/step_plan.h"
#include "plan/tensor_checks.h"

namespace torchopt_ext {
namespace {

// The learning rate is a number or a tensor.
template <class Lr>
void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList state_steps,
           const at::Tensor& control, Lr lr, double beta1, double beta2, double eps,
           double weight_decay, bool decoupled_weight_decay, bool maximize, bool bias_correction) {
  check_control(control);
  GroupHyper hyper{
      {0.0, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize, bias_correction},
      {}};
  if constexpr (std::is_same_v<Lr, double>) {
    hyper.adam.lr = lr;
  } else {
    hyper.lr = lr;
    check_lr(lr, control.device());
  }
  check_hyper(hyper.adam);
  const size_t n = params.size();
  const auto check_count = [n](at::TensorList list, const char* what) {
    TORCH_CHECK(list.size() == n, "got ", list.size(), " ", what, " for ", n, " parameters");
  };
  check_count(grads, "gradients");
  check_count(exp_avgs, "exp_avgs");
  check_count(exp_avg_sqs, "exp_avg_sqs");
  check_count(state_steps, "state_steps");
  if (!max_exp_avg_sqs.empty()) {
    check_count(max_exp_avg_sqs, "max_exp_avg_sqs");
  }
  std::vector<StepPlan::Entry> entries(n);
  for (size_t i = 0; i < n; ++i) {
    StepPlan::Entry& entry = entries[i];
    entry.position = i;
    entry.place.index = static_cast<uint32_t>(i);
    entry.tensors[kParam] = params[i];
    entry.tensors[kExpAvg] = exp_avgs[i];
    entry.tensors[kExpAvgSq] = exp_avg_sqs[i];
    entry.tensors[kStep] = state_steps[i];
    if (!max_exp_avg_sqs.empty()) {
      entry.tensors[kMaxExpAvgSq] = max_exp_avg_sqs[i];
    }
    check_supported(params[i], Label{"parameter", i});
    check_dense(params[i], Label{"parameter", i});
    check_supported(grads[i], Label{"gradient", i});
  }
  StepPlan plan(entries, control.device(), {}, grads);
  for (size_t i = 0; i < n; ++i) {
    plan.set_gradient(i, grads[i]);
  }
  plan.update({hyper}, control);
}

std::string arguments(const std::string& lr) {
  return "(Tensor(a! -> *)[] params, Tensor[] grads, Tensor(b! -> *)[] exp_avgs, "
         "Tensor(c! -> *)[] exp_avg_sqs, Tensor(d! -> *)[] max_exp_avg_sqs, "
         "Tensor(e! -> *)[] state_steps, Tensor control, *, " +
         lr +
         " lr, float beta1, float beta2, float eps, float weight_decay, "
         "bool decoupled_weight_decay, bool maximize, bool bias_correction=True) -> ()";
}
const Operator kAdamTensorLr("adam_.tensor_lr", arguments("Tensor"), adam_<const at::Tensor&>);
const Operator kAdam("adam_", arguments("float"), adam_<double>);

}  // namespace
}  // namespace torchopt_ext

// Pass B: adam_, lion_, sgd_, muon_, one operator for each algorithm of kernels/algorithms.h. One
// step over lists of tensors. Lists of optional states are empty without the state. Reads
// grad_factor, lr_factor and skip from the control block. Does not write gradients. Overload
// tensor_lr: the same with the learning rate in a one-element tensor, on the CPU or the parameters'
// device. muon_ also takes the coefficients of Newton-Schulz iterations, three a step, and a factor
// of the learning rate for each parameter, a matrix.
#include <sstream>

#include "kernels/algorithms.h"
#include "ops/operator.h"
#include "plan/step_plan.h"
#include "plan/tensor_checks.h"

namespace torchopt_ext {
namespace {

// The arguments of an operator that writes directions, besides those of every operator.
struct MatrixArguments {
  std::shared_ptr<const NewtonSchulz> newton_schulz;
  std::vector<double> lr_scales;

  Orthogonalization of(const at::Tensor& param, size_t i) const {
    TORCH_CHECK(param.dim() == 2 && param.is_contiguous(), Label{"parameter", i}, " has shape ",
                param.sizes(), " and strides ", param.strides(), ", expected a contiguous matrix");
    TORCH_CHECK(i < lr_scales.size(), "got ", lr_scales.size(),
                " lr_scales, expected one for each "
                "parameter");
    const int64_t rows = param.size(0);
    const int64_t cols = param.size(1);
    return {newton_schulz, std::nullopt, {{0, rows, cols, cols, lr_scales[i]}}};
  }
};

// Lists: parameters, gradients, the states, step counts. Then control and hyperparameters.
void update_(Algorithm algorithm, const std::vector<std::vector<at::Tensor>>& lists,
             const at::Tensor& control, const Hyper& hyper, const at::Tensor& lr,
             const MatrixArguments& matrices) {
  const Declaration declaration = declaration_of(algorithm);
  check_control(control);
  if (lr.defined()) {
    check_lr(lr, control.device());
  }
  check_hyper(algorithm, hyper);
  const std::vector<at::Tensor>& params = lists[0];
  const std::vector<at::Tensor>& grads = lists[1];
  const size_t n = params.size();
  const auto check_count = [n](const std::vector<at::Tensor>& list, const std::string& what) {
    TORCH_CHECK(list.size() == n, "got ", list.size(), " ", what, " for ", n, " parameters");
  };
  check_count(grads, "gradients");
  check_count(lists.back(), "state_steps");
  for (size_t k = 0; k < declaration.states.size(); ++k) {
    if (declaration.states[k].when == nullptr || !lists[2 + k].empty()) {
      check_count(lists[2 + k], std::string(declaration.states[k].name) + "s");
    } else {
      const auto& hypers = declaration.hypers;
      const auto asks = std::ranges::find_if(hypers, [&](const HyperSpec& spec) {
        return spec.in_operator && std::string_view(spec.name) == declaration.states[k].when;
      });
      TORCH_CHECK(asks == hypers.end() || hyper[static_cast<int>(asks - hypers.begin())] == 0.0,
                  asks->name, " needs ", declaration.states[k].name, "s");
    }
  }
  std::vector<StepPlan::Entry> entries(n);
  for (size_t i = 0; i < n; ++i) {
    StepPlan::Entry& entry = entries[i];
    entry.algorithm = algorithm;
    entry.position = i;
    entry.place.index = static_cast<uint32_t>(i);
    entry.tensors[kParam] = params[i];
    for (size_t k = 0; k < declaration.states.size(); ++k) {
      if (!lists[2 + k].empty()) {
        entry.tensors[kState + k] = lists[2 + k][i];
      }
    }
    entry.tensors[kStep] = lists.back()[i];
    check_supported(params[i], Label{"parameter", i});
    check_dense(params[i], Label{"parameter", i});
    check_supported(grads[i], Label{"gradient", i});
    if (declaration.writes_direction) {
      entry.orthogonalization = matrices.of(params[i], i);
    }
  }
  StepPlan plan(entries, control.device(), {}, grads);
  for (size_t i = 0; i < n; ++i) {
    plan.set_gradient(i, grads[i]);
  }
  plan.update({{algorithm, hyper, lr}}, control);
}

// Takes the operator's arguments off the stack, in the order of schema().
template <class A>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, n);
  std::vector<std::vector<at::Tensor>> lists;
  size_t at = 0;
  for (; arguments[at].isTensorList(); ++at) {
    lists.push_back(arguments[at].toTensorVector());
  }
  const at::Tensor control = arguments[at++].toTensor();
  at::Tensor lr;
  Hyper hyper{};
  size_t i = 0;
  for (const HyperSpec& spec : A::kHypers) {
    if (i == kLr && arguments[at].isTensor()) {
      lr = arguments[at++].toTensor();
    } else if (spec.in_operator) {
      const c10::IValue& value = arguments[at++];
      hyper.value[i] = value.isBool() ? static_cast<double>(value.toBool()) : value.toDouble();
    }
    ++i;
  }
  MatrixArguments matrices;
  if constexpr (kWritesDirection<A>) {
    const std::vector<double> coefficients = arguments[at++].toDoubleVector();
    const double eps = arguments[at++].toDouble();
    matrices.newton_schulz = std::make_shared<NewtonSchulz>(newton_schulz_of(coefficients, eps));
    matrices.lr_scales = arguments[at].toDoubleVector();
  }
  update_(kNumberOf<A>, lists, control, hyper, lr, matrices);
  torch::jit::drop(*stack, n);
}

template <class A>
std::string schema(const char* lr) {
  std::ostringstream text;
  text << "(Tensor(a! -> *)[] params, Tensor[] grads";
  char alias = 'b';
  for (const StateSpec& state : A::kStates) {
    text << ", Tensor(" << alias++ << "! -> *)[] " << state.name << "s";
  }
  text << ", Tensor(" << alias << "! -> *)[] state_steps, Tensor control, *, " << lr << " lr";
  for (const HyperSpec& spec : std::span(A::kHypers).subspan(1)) {
    if (spec.in_operator) {
      if (spec.range == Range::kFlag) {
        text << ", bool " << spec.name << (spec.usual != 0.0 ? "=True" : "=False");
      } else {
        text << ", float " << spec.name << "=" << spec.usual;
      }
    }
  }
  if constexpr (kWritesDirection<A>) {
    text << ", float[] ns_coefficients, float eps=1e-07, float[] lr_scales";
  }
  text << ") -> ()";
  return text.str();
}

template <class A>
struct UpdateOperator {
  Operator tensor_lr{A::kOperator + std::string(".tensor_lr"), schema<A>("Tensor"),
                     torch::CppFunction::makeFromBoxedFunction<&boxed<A>>()};
  Operator number_lr{A::kOperator, schema<A>("float"),
                     torch::CppFunction::makeFromBoxedFunction<&boxed<A>>()};
};

template <class List>
struct UpdateOperators;
template <class... As>
struct UpdateOperators<std::tuple<As...>> {
  std::tuple<UpdateOperator<As>...> all;
};
const UpdateOperators<Algorithms> kOperators;

}  // namespace
}  // namespace torchopt_ext

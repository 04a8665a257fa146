// The C++ class as an operator, for comparison with the Python class. It works on copies: Python's
// tensors are not to be stepped without its lock.
#include <torch/library.h>
#include <torchopt_ext/optim.h>

namespace {

// Steps copies of `params` with `gradients`, those of one step after those of another. `settings`:
// lr, eps, weight_decay, beta1, beta2, amsgrad, maximize, decoupled_weight_decay, max_grad_norm,
// skip_nonfinite. Returns the parameters, each one's moments and step count, and the norms.
std::vector<at::Tensor> steps(at::TensorList params, at::TensorList gradients,
                              const c10::List<double>& settings) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& param : params) {
    copies.push_back(param.detach().clone().requires_grad_());
  }
  torchopt_ext::FusedAdamW optimizer(copies, torchopt_ext::FusedAdamWOptions(settings.get(0))
                                                 .eps(settings.get(1))
                                                 .weight_decay(settings.get(2))
                                                 .betas({settings.get(3), settings.get(4)})
                                                 .amsgrad(settings.get(5) != 0.0)
                                                 .maximize(settings.get(6) != 0.0)
                                                 .decoupled_weight_decay(settings.get(7) != 0.0));
  optimizer.max_grad_norm(settings.get(8)).skip_nonfinite(settings.get(9) != 0.0);
  std::vector<at::Tensor> norms;
  for (size_t begin = 0; begin < gradients.size(); begin += copies.size()) {
    for (size_t i = 0; i < copies.size(); ++i) {
      copies[i].mutable_grad() = gradients[begin + i].clone();
    }
    optimizer.step();
    norms.push_back(optimizer.grad_norm());
  }
  std::vector<at::Tensor> results = copies;
  for (const at::Tensor& param : copies) {
    const auto& state = static_cast<const torchopt_ext::FusedAdamWParamState&>(
        *optimizer.state().at(param.unsafeGetTensorImpl()));
    results.insert(results.end(), {state.exp_avg(), state.exp_avg_sq(), state.step()});
  }
  results.insert(results.end(), norms.begin(), norms.end());
  return results;
}

}  // namespace

TORCH_LIBRARY(torchopt_ext_test, m) {
  m.def("steps(Tensor[] params, Tensor[] gradients, float[] settings) -> Tensor[]");
  m.impl("steps", c10::DispatchKey::CompositeExplicitAutograd, steps);
}

#include "python/param_group.h"

#include <torch/csrc/autograd/python_variable.h>

#include "plan/step_checks.h"

namespace torchopt_ext {

namespace py = pybind11;

GroupHyper read_group(py::handle group, at::Device device) {
  GroupHyper hyper{};
  const py::object lr = group["lr"];
  if (THPVariable_Check(lr.ptr())) {
    hyper.lr = THPVariable_Unpack(lr.ptr());
    check_lr(hyper.lr, device);
  } else {
    hyper.adam.lr = py::float_(lr);
  }
  const py::sequence betas = group["betas"];
  hyper.adam.beta1 = py::float_(betas[0]);
  hyper.adam.beta2 = py::float_(betas[1]);
  hyper.adam.eps = py::float_(group["eps"]);
  hyper.adam.weight_decay = py::float_(group["weight_decay"]);
  hyper.adam.maximize = py::bool_(group["maximize"]);
  hyper.adam.decoupled_weight_decay = py::bool_(group["decoupled_weight_decay"]);
  return hyper;
}

}  // namespace torchopt_ext

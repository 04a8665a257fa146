#include "python/gradient_sums.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "ops/operators.h"
#include "plan/tensor_checks.h"
#include "python/param_lists.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

bool is_read_as_it_is(const at::Tensor& gradient, const at::Tensor& like) {
  const at::ScalarType dtype = gradient.scalar_type();
  const bool summed =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!summed || gradient.layout() != at::kStrided ||
      gradient.unsafeGetTensorImpl()->is_python_dispatch()) {
    return false;
  }
  return gradient.device() == like.device() && like.is_non_overlapping_and_dense() &&
         has_shape(*gradient.unsafeGetTensorImpl(), shape_of(like)) && !is_lazy(gradient) &&
         address(*gradient.unsafeGetTensorImpl()) != nullptr;
}

}  // namespace

Marks sum_gradients(const py::list& like, const std::optional<py::list>& gradients,
                    const at::Tensor& accumulator) {
  TORCH_CHECK_VALUE(!gradients || like.size() == gradients->size(), "got ", gradients->size(),
                    " gradients for ", like.size(), " tensors");
  const at::Device device = accumulator.device();
  Marks marks(like.size());
  std::vector<at::Tensor> summed;
  summed.reserve(like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    if (gradients && py::handle((*gradients)[i]).is_none()) {
      continue;
    }
    const at::Tensor& gradient = gradients ? tensor_at(*gradients, i) : tensor.grad();
    if (gradient.defined() && gradient.device() == device && is_read_as_it_is(gradient, tensor)) {
      marks[i] = std::make_shared<TensorMark>(gradient);
      summed.push_back(gradient);
    }
  }
  const py::gil_scoped_release unlocked;
  grad_sumsq_(summed, accumulator);
  return marks;
}

bool gradients_fit(const py::list& params, const Marks& marks) {
  TORCH_CHECK_VALUE(params.size() == marks.size(), "there are ", marks.size(), " marks for ",
                    params.size(), " parameters");
  for (size_t i = 0; i < marks.size(); ++i) {
    const at::Tensor& gradient = tensor_at(params, i).grad();
    if (marks[i] == nullptr ? gradient.defined()
                            : !gradient.defined() || !marks[i]->fits(gradient)) {
      return false;
    }
  }
  return true;
}

}  // namespace torchopt_ext

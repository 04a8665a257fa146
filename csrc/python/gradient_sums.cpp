#include "python/gradient_sums.h"

#include <torch/csrc/autograd/python_variable.h>

#include "ops/grad_sumsq.h"
#include "plan/step_checks.h"
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
  return gradient.device() == like.device() && is_dense(like) &&
         has_shape(*gradient.unsafeGetTensorImpl(), shape_of(like)) && !is_lazy(gradient) &&
         address(*gradient.unsafeGetTensorImpl()) != nullptr;
}

}  // namespace

Marks sum_gradients(const py::list& like, const py::list& gradients,
                    const at::Tensor& accumulator) {
  check_accumulator(accumulator);
  TORCH_CHECK_VALUE(like.size() == gradients.size(), "got ", gradients.size(), " gradients for ",
                    like.size(), " tensors");
  const at::Device device = accumulator.device();
  Marks marks(gradients.size());
  std::vector<at::Tensor> summed;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (py::handle(gradients[i]).is_none()) {
      continue;
    }
    const at::Tensor& gradient = tensor_at(gradients, i);
    if (gradient.device() == device && is_read_as_it_is(gradient, tensor_at(like, i))) {
      marks[i] = std::make_shared<TensorMark>(gradient);
      summed.push_back(gradient);
    }
  }
  const py::gil_scoped_release unlocked;
  grad_sumsq_(summed, accumulator);
  return marks;
}

bool all_fit(const Marks& marks, const py::list& tensors) {
  for (size_t i = 0; i < marks.size(); ++i) {
    if (py::handle(tensors[i]).is_none() || !marks[i]->fits(tensor_at(tensors, i))) {
      return false;
    }
  }
  return true;
}

}  // namespace torchopt_ext

// Pass A in backward (optim/norm_in_backward.py): sums the squares of some gradients and marks the
// gradients, so that the step sees whether they changed.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <vector>

#include "ops/operators.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "python/bindings.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// A tensor as it was at one time. The mark keeps neither the tensor nor its memory alive. It holds
// the version counter, so that a later tensor at the same address has another counter.
class TensorMark {
 public:
  explicit TensorMark(const at::Tensor& tensor)
      : memory_(address(*tensor.unsafeGetTensorImpl())),
        shape_(shape_of(tensor)),
        dtype_(tensor.scalar_type()),
        counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.enabled() ? counter_.current_version() : 0) {}

  // Whether a tensor is the same view of the same memory, and no operator has written to it since.
  // False also for tensors of inference mode, whose changes are not counted.
  bool fits(const at::Tensor& tensor) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return address(impl) == memory_ && tensor.scalar_type() == dtype_ && has_shape(impl, shape_) &&
           shares_version(counter_, impl.version_counter()) &&
           counter_.current_version() == version_;
  }

  // Whether a change of one tensor counts as a change of the other, as with views of one tensor.
  bool changes_with(const TensorMark& other) const {
    return shares_version(counter_, other.counter_);
  }

 private:
  const void* memory_;
  Shape shape_;
  at::ScalarType dtype_;
  c10::VariableVersion counter_;
  uint32_t version_;
};

using Marks = std::vector<std::shared_ptr<TensorMark>>;

// Whether a plan reads the gradient of `like` without a copy.
bool is_read_as_it_is(const at::Tensor& gradient, const at::Tensor& like) {
  const c10::TensorImpl& impl = *gradient.unsafeGetTensorImpl();
  const at::ScalarType dtype = gradient.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype)) &&
         gradient.layout() == at::kStrided && !impl.is_python_dispatch() &&
         gradient.device() == like.device() && like.is_non_overlapping_and_dense() &&
         has_shape(impl, shape_of(like)) && !is_lazy(gradient) && address(impl) != nullptr;
}

// Adds the squares of the gradients that a plan reads as they are. Returns a null mark for each
// gradient left out, which may be None. Without `gradients`, takes the gradients of `like`, which
// avoids a Python object for each.
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

// Whether every parameter's gradient fits its mark. A null mark fits only an absent gradient.
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

}  // namespace

void add_gradient_sums(py::module_& m) {
  py::class_<TensorMark, std::shared_ptr<TensorMark>>(m, "TensorMark")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("fits", &TensorMark::fits, py::arg("tensor"))
      .def("changes_with", &TensorMark::changes_with, py::arg("other"));
  m.def("sum_gradients", sum_gradients, py::arg("like"), py::arg("gradients"),
        py::arg("accumulator"));
  m.def("gradients_fit", gradients_fit, py::arg("params"), py::arg("marks"));
}

}  // namespace torchopt_ext

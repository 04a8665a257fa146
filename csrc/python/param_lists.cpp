#include "python/param_lists.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Value(tensor) of every tensor, one after the other.
template <class Value>
py::bytes packed(const py::list& tensors, const Value& value) {
  std::string bytes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto found = value(tensor_at(tensors, i));
    bytes.append(reinterpret_cast<const char*>(&found), sizeof(found));
  }
  return bytes;
}

}  // namespace

const at::Tensor& tensor_at(const py::list& tensors, size_t i) {
  PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
  TORCH_CHECK_TYPE(THPVariable_Check(object), "item ", i, " is no tensor");
  return THPVariable_Unpack(object);
}

py::bytes requires_grad(const py::list& tensors) {
  return packed(tensors, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

py::bytes addresses(const py::list& tensors) {
  return packed(tensors, [](const at::Tensor& tensor) {
    return tensor.numel() == 0 ? nullptr : tensor.const_data_ptr();
  });
}

void share_gradients(const py::list& tensors, const py::list& params) {
  TORCH_CHECK_VALUE(tensors.size() == params.size(), "got ", tensors.size(), " tensors for ",
                    params.size(), " params");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensor_at(tensors, i);
    const at::Tensor& gradient = tensor_at(params, i).grad();
    if (!tensor.grad().is_same(gradient)) {
      tensor.mutable_grad() = gradient;
    }
  }
}

void clear_gradients(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensor_at(tensors, i);
    if (tensor.grad().defined()) {
      tensor.mutable_grad().reset();
    }
  }
}

void increment_versions(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    torch::autograd::impl::bump_version(tensor_at(tensors, i));
  }
}

}  // namespace torchopt_ext

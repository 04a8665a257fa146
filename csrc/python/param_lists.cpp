#include "python/param_lists.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <vector>

#include "ops/operators.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Returns the bytes of value(tensor) for every tensor, one after the other.
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

void check_step(const py::list& params, const py::list& masters, const py::list& gradients,
                const py::list& names) {
  TORCH_CHECK_VALUE(masters.size() == params.size() && gradients.size() == params.size() &&
                        names.size() == params.size(),
                    "got ", masters.size(), " masters, ", gradients.size(), " gradients and ",
                    names.size(), " names for ", params.size(), " params");
  for (size_t i = 0; i < params.size(); ++i) {
    if (py::handle(PyList_GET_ITEM(gradients.ptr(), static_cast<Py_ssize_t>(i))).is_none()) {
      continue;
    }
    const at::Tensor& param = tensor_at(params, i);
    const at::Tensor& master = tensor_at(masters, i);
    const at::Tensor& gradient = tensor_at(gradients, i);
    const auto name = [&] { return py::cast<std::string>(names[i]); };
    const at::ScalarType dtype = gradient.scalar_type();
    const bool wider = dtype == at::kFloat && c10::elementSize(param.scalar_type()) == 2;
    TORCH_CHECK(gradient.layout() == at::kStrided, "the gradient of parameter ", name(),
                " has layout ", gradient.layout(), ", expected a dense tensor");
    TORCH_CHECK(dtype == param.scalar_type() || wider, "the gradient of parameter ", name(),
                " has dtype ", dtype, ", expected ", param.scalar_type());
    TORCH_CHECK(gradient.sizes() == param.sizes(), "the gradient of parameter ", name(),
                " has shape ", gradient.sizes(), ", expected ", param.sizes());
    TORCH_CHECK(gradient.device() == param.device(), "the gradient of parameter ", name(),
                " is on ", gradient.device(), ", expected ", param.device());
    TORCH_CHECK(master.sizes() == param.sizes(), "parameter ", name(), " has shape ", param.sizes(),
                ", and had ", master.sizes(), " when its master was made");
    TORCH_CHECK(master.device() == param.device(), "parameter ", name(), " is on ", param.device(),
                ", its master on ", master.device());
    for (const at::Tensor* tensor : {&param, &master, &gradient}) {
      TORCH_CHECK(tensor->numel() == 0 || tensor->storage().nbytes() > 0, "parameter ", name(),
                  ", its master or its gradient has had its storage freed");
    }
  }
}

void scaled_copy_list(const py::list& to, const py::list& from, const at::Tensor& control,
                      bool unscale) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(to.size() + from.size());
  for (const py::list& list : {to, from}) {
    for (size_t i = 0; i < list.size(); ++i) {
      tensors.push_back(tensor_at(list, i));
    }
  }
  const at::TensorList all(tensors);
  const py::gil_scoped_release others_may_run;
  scaled_copy_(all.slice(0, to.size()), all.slice(to.size()), control, unscale);
}

void increment_versions(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    torch::autograd::impl::bump_version(tensor_at(tensors, i));
  }
}

}  // namespace torchopt_ext

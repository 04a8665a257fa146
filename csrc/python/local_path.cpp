#include "python/local_path.h"

#include <torch/csrc/autograd/python_variable.h>

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Interned attribute names, which are never freed.
PyObject* const kLocalTensor = PyUnicode_InternFromString("_local_tensor");
PyObject* const kSpec = PyUnicode_InternFromString("_spec");
PyObject* const kPlacements = PyUnicode_InternFromString("placements");
PyObject* const kCopy = PyUnicode_InternFromString("low_precision_copy");
PyObject* const kMesh = PyUnicode_InternFromString("mesh");

// Raises if the attribute is missing.
py::object attribute(py::handle object, PyObject* name) { return object.attr(py::handle(name)); }

}  // namespace

py::object LocalPath::follow(PyObject* object) const {
  py::object tensor = attribute(object, attributes[0]);
  return attributes[1] == nullptr ? tensor : attribute(tensor, attributes[1]);
}

LocalPath local_path(py::handle object, py::handle local) {
  LocalPath path;
  if (object.is(local)) {
    return path;
  }
  path.distributed = PyObject_HasAttr(object.ptr(), kSpec) != 0;
  py::object shard = py::reinterpret_borrow<py::object>(object);
  if (path.distributed) {
    path.attributes[0] = kLocalTensor;
    shard = path.follow(object.ptr());
    if (shard.is(local)) {
      return path;
    }
  }
  PyObject*& next = path.attributes[path.distributed ? 1 : 0];
  if (PyObject_HasAttr(shard.ptr(), kCopy) != 0 && attribute(shard, kCopy).is(local)) {
    next = kCopy;
    return path;
  }
  const py::tuple flat = shard.attr("__tensor_flatten__")();
  for (const py::handle name : py::list(flat[0])) {
    if (attribute(shard, name.ptr()).is(local)) {
      next = PyUnicode_InternFromString(py::cast<std::string>(name).c_str());
      return path;
    }
  }
  TORCH_CHECK_TYPE(false, "the inner tensor of a ", Py_TYPE(shard.ptr())->tp_name,
                   " is another object each time it is read");
}

py::object plain_local_gradient(PyObject* param, PyObject* gradient) {
  if (THPVariable_CheckExact(gradient) || PyObject_HasAttr(gradient, kSpec) == 0) {
    return py::none();
  }
  const py::object of_param = attribute(param, kSpec);
  const py::object of_gradient = attribute(gradient, kSpec);
  if (!of_param.is(of_gradient) &&
      (!attribute(of_param, kMesh).is(attribute(of_gradient, kMesh)) ||
       !attribute(of_param, kPlacements).equal(attribute(of_gradient, kPlacements)))) {
    return py::none();
  }
  const py::object local = attribute(gradient, kLocalTensor);
  return THPVariable_CheckExact(local.ptr()) ? local : py::none();
}

}  // namespace torchopt_ext

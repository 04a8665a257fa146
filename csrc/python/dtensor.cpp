#include "python/dtensor.h"

#include <torch/csrc/autograd/python_variable.h>

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// An error if it is missing.
py::object attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
}

}  // namespace

py::object local_tensor(PyObject* dtensor) {
  static PyObject* const kLocal = PyUnicode_InternFromString("_local_tensor");
  return attribute(dtensor, kLocal);
}

py::object plain_local_gradient(PyObject* param, PyObject* gradient) {
  static PyObject* const kSpec = PyUnicode_InternFromString("_spec");
  static PyObject* const kPlacements = PyUnicode_InternFromString("placements");
  static PyObject* const kMesh = PyUnicode_InternFromString("mesh");
  if (Py_TYPE(gradient) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
      PyObject_HasAttr(gradient, kSpec) == 0) {
    return py::none();
  }
  const py::object wanted = attribute(param, kSpec);
  const py::object found = attribute(gradient, kSpec);
  if (!wanted.is(found)) {
    const int same =
        attribute(wanted.ptr(), kMesh).is(attribute(found.ptr(), kMesh))
            ? PyObject_RichCompareBool(attribute(wanted.ptr(), kPlacements).ptr(),
                                       attribute(found.ptr(), kPlacements).ptr(), Py_EQ)
            : 0;
    if (same < 0) {
      throw py::error_already_set();
    }
    if (same == 0) {
      return py::none();
    }
  }
  const py::object local = local_tensor(gradient);
  const bool complete = Py_TYPE(local.ptr()) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
  return complete ? local : py::none();
}

}  // namespace torchopt_ext

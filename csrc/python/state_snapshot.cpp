#include "python/state_snapshot.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Calls visit(object) on every parameter and every key, entry and value of state, in order, until
// it returns false. Returns whether it never did.
template <class Visit>
bool walk(const py::list& param_groups, const py::dict& state, const Visit& visit) {
  for (const py::handle group : param_groups) {
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    if (params == nullptr || !PyList_Check(params) || !visit(params)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      if (!visit(PyList_GET_ITEM(params, i))) {
        return false;
      }
    }
  }
  PyObject* key = nullptr;
  PyObject* entry = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &entry) != 0;) {
    if (!visit(key) || !visit(entry)) {
      return false;
    }
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t inner = 0;
         PyDict_Check(entry) && PyDict_Next(entry, &inner, &name, &value) != 0;) {
      if (!visit(value)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

StateSnapshot::StateSnapshot(const py::list& param_groups, const py::dict& state) {
  walk(param_groups, state, [this](PyObject* object) {
    seen_.push_back(py::reinterpret_borrow<py::object>(object));
    return true;
  });
}

bool StateSnapshot::matches(const py::list& param_groups, const py::dict& state) const {
  size_t next = 0;
  const bool same = walk(param_groups, state, [&](PyObject* object) {
    return next < seen_.size() && seen_[next++].ptr() == object;
  });
  return same && next == seen_.size();
}

}  // namespace torchopt_ext

#include "python/state_snapshot.h"

#include <algorithm>
#include <array>

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Whether a state entry is one that a step reads; users may keep others and replace them at will.
bool is_read(PyObject* name) {
  static const std::array<PyObject*, 6> names = {
      PyUnicode_InternFromString("step"),          PyUnicode_InternFromString("exp_avg"),
      PyUnicode_InternFromString("exp_avg_sq"),    PyUnicode_InternFromString("max_exp_avg_sq"),
      PyUnicode_InternFromString("master_weight"), PyUnicode_InternFromString("remainder")};
  if (std::find(names.begin(), names.end(), name) != names.end()) {
    return true;
  }
  return std::any_of(names.begin(), names.end(), [name](PyObject* known) {
    return PyUnicode_Check(name) && PyUnicode_Compare(name, known) == 0;
  });
}

// Calls visit(object) on every parameter and every key, entry and value of state, in order, until
// it returns false. Returns whether it never did.
template <class Visit>
bool walk(const py::list& param_groups, const py::dict& state, const Visit& visit) {
  for (const py::handle group : param_groups) {
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    PyObject* amsgrad =
        PyDict_GetItemString(group.ptr(), "amsgrad");  // decides which state is used
    if (params == nullptr || !PyList_Check(params) || !visit(params) || amsgrad == nullptr ||
        !visit(amsgrad)) {
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
      if (is_read(name) && !visit(value)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

StateSnapshot::StateSnapshot(const py::list& param_groups, const py::dict& state) {
  walk(param_groups, state, [this](PyObject* object) {
    seen_.push_back(object);
    return true;
  });
}

bool StateSnapshot::matches(const py::list& param_groups, const py::dict& state) const {
  size_t next = 0;
  const bool same = walk(param_groups, state, [&](PyObject* object) {
    return next < seen_.size() && seen_[next++] == object;
  });
  return same && next == seen_.size();
}

py::list StateSnapshot::objects() const {
  py::list list;
  for (PyObject* object : seen_) {
    list.append(py::handle(object));
  }
  return list;
}

}  // namespace torchopt_ext

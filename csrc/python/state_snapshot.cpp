#include "python/state_snapshot.h"

#include <algorithm>

#include "plan/for_each_entry.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Whether a step reads the state entry of this name. Users may keep and replace other entries at
// will.
bool is_read(PyObject* name) {
  static constexpr const char* kNames[] = {
      "step",      "exp_avg",    "exp_avg_sq",       "max_exp_avg_sq",     "master_weight",
      "remainder", "remainder8", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale_v2",
      "exp_avg_sq_scale_v2"};
  return PyUnicode_Check(name) && std::ranges::any_of(kNames, [name](const char* read) {
           return PyUnicode_CompareWithASCIIString(name, read) == 0;
         });
}

// Returns a number that no other dictionary has, nor this dictionary before its last change (PEP
// 509). The contents lie elsewhere in memory: comparing them takes several times as long. Returns 0
// if Python has no such number, or if `dict` is another object that a user put into the state.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030e0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // removed in Python 3.14
  return PyDict_Check(dict) ? reinterpret_cast<PyDictObject*>(dict)->ma_version_tag : 0;
#pragma GCC diagnostic pop
#else
  static_cast<void>(dict);
  return 0;
#endif
}

bool is_version(PyObject* dict, uint64_t version) {
  return version != 0 && version_of(dict) == version;
}

// Calls visit(object) on every group's list of parameters, its amsgrad and its parameters, in
// order, until a call returns false or a group lacks one of them. Returns whether all were visited.
template <class Visit>
bool walk_groups(const py::list& param_groups, Visit&& visit) {
  for (const py::handle group : param_groups) {
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    PyObject* amsgrad =
        PyDict_GetItemString(group.ptr(), "amsgrad");  // decides which state is used
    const bool lists = params != nullptr && (PyList_Check(params) || PyTuple_Check(params));
    if (!lists || !visit(params) || amsgrad == nullptr || !visit(amsgrad)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); ++i) {
      if (!visit(PySequence_Fast_GET_ITEM(params, i))) {
        return false;
      }
    }
  }
  return true;
}

py::object owned(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

}  // namespace

StateSnapshot::StateSnapshot(const py::list& param_groups, const py::dict& state)
    : state_version_(version_of(state.ptr())) {
  walk_groups(param_groups, [this](PyObject* object) {
    in_groups_.push_back(owned(object));
    return true;
  });
  for (const auto& [param, entry] : state) {
    const size_t first = values_.size();
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(entry.ptr(), &at, &name, &value) != 0;) {
      if (is_read(name)) {
        values_.push_back({owned(name), owned(value)});
      }
    }
    entries_.push_back(
        {owned(entry.ptr()), version_of(entry.ptr()), owned(param.ptr()), first, values_.size()});
  }
}

bool StateSnapshot::entry_matches(const Entry& entry) const {
  size_t next = entry.first;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(entry.dict.ptr(), &at, &name, &value) != 0;) {
    if (next < entry.last && values_[next].name.ptr() == name) {
      if (values_[next++].object.ptr() != value) {
        return false;
      }
    } else if (is_read(name)) {
      return false;
    }
  }
  return next == entry.last;
}

bool StateSnapshot::state_matches(const py::dict& state) {
  if (is_version(state.ptr(), state_version_)) {
    return true;
  }
  if (PyDict_GET_SIZE(state.ptr()) != static_cast<Py_ssize_t>(entries_.size())) {
    return false;
  }
  PyObject* param = nullptr;
  PyObject* dict = nullptr;
  size_t i = 0;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &dict) != 0; ++i) {
    if (entries_[i].param.ptr() != param || entries_[i].dict.ptr() != dict) {
      return false;
    }
  }
  state_version_ = version_of(state.ptr());
  return true;
}

bool StateSnapshot::matches(const py::list& param_groups, const py::dict& state) {
  size_t i = 0;
  const auto is_next = [&](PyObject* object) {
    return i < in_groups_.size() && in_groups_[i++].ptr() == object;
  };
  if (!walk_groups(param_groups, is_next) || i != in_groups_.size() || !state_matches(state)) {
    return false;
  }
  for (i = 0; i < entries_.size(); ++i) {
    if (i + 2 * kEntriesAhead < entries_.size()) {
      __builtin_prefetch(entries_[i + 2 * kEntriesAhead].dict.ptr());
    }
    Entry& known = entries_[i];
    if (!is_version(known.dict.ptr(), known.version)) {
      if (!entry_matches(known)) {
        return false;
      }
      known.version = version_of(known.dict.ptr());
    }
  }
  return true;
}

int StateSnapshot::traverse(visitproc visit, void* arg) const {
  for (const py::object& object : in_groups_) {
    Py_VISIT(object.ptr());
  }
  for (const Entry& entry : entries_) {
    Py_VISIT(entry.param.ptr());
    Py_VISIT(entry.dict.ptr());
  }
  for (const Value& value : values_) {
    Py_VISIT(value.name.ptr());
    Py_VISIT(value.object.ptr());
  }
  return 0;
}

}  // namespace torchopt_ext

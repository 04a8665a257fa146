#include "python/state_snapshot.h"

#include <algorithm>

#include "plan/for_each_entry.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// The names of the state entries that a step reads, interned. Users may keep and replace other
// entries at will.
const std::array kNames = [] {
  std::array names{"step",
                   "exp_avg",
                   "exp_avg_sq",
                   "max_exp_avg_sq",
                   "master_weight",
                   "remainder",
                   "remainder8",
                   "exp_avg_codes",
                   "exp_avg_sq_codes",
                   "exp_avg_scale_v2",
                   "exp_avg_sq_scale_v2"};
  std::array<PyObject*, names.size()> interned{};
  std::ranges::transform(names, interned.begin(), PyUnicode_InternFromString);
  return interned;
}();

// Returns the index of a name in kNames; their number if a step does not read the entry.
size_t index_of(PyObject* name) {
  auto found = std::ranges::find(kNames, name);
  if (found == kNames.end() && PyUnicode_Check(name) && PyUnicode_CHECK_INTERNED(name) == 0) {
    found = std::ranges::find_if(
        kNames, [name](PyObject* read) { return PyUnicode_Compare(name, read) == 0; });
  }
  return static_cast<size_t>(found - kNames.begin());
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

constexpr std::array<char, 2> kMarks{};  // no amsgrad, amsgrad

// Calls visit(pointer) on a mark of every group's amsgrad, which decides what state is used, and
// on the group's parameters, in order, until a call returns false or a group lacks one of them.
// Returns whether all were visited.
template <class Visit>
bool walk_groups(const py::list& param_groups, Visit&& visit) {
  for (const py::handle group : param_groups) {
    PyObject* amsgrad = PyDict_GetItemString(group.ptr(), "amsgrad");
    const int is_true = amsgrad == nullptr ? 0 : PyObject_IsTrue(amsgrad);
    if (is_true < 0) {
      throw py::error_already_set();
    }
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    if (amsgrad == nullptr || !visit(&kMarks[static_cast<size_t>(is_true)]) || params == nullptr ||
        !(PyList_Check(params) || PyTuple_Check(params))) {
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

}  // namespace

StateSnapshot::StateSnapshot(const py::list& param_groups, const py::dict& state)
    : state_version_(version_of(state.ptr())) {
  walk_groups(param_groups, [this](const void* pointer) {
    in_groups_.push_back(pointer);
    return true;
  });
  for (const auto& [param, entry] : state) {
    entries_.push_back({param.ptr(), entry.ptr(), version_of(entry.ptr())});
    values_.push_back(values_of(entry.ptr()));
  }
}

StateSnapshot::Values StateSnapshot::values_of(PyObject* dict) {
  static_assert(std::tuple_size_v<decltype(kNames)> == kRead);
  Values values{};
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value) != 0;) {
    if (const size_t index = index_of(name); index < kRead) {
      values[index] = value;
    }
  }
  return values;
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
    if (entries_[i].param != param || entries_[i].dict != dict) {
      return false;
    }
  }
  state_version_ = version_of(state.ptr());
  return true;
}

bool StateSnapshot::matches(const py::list& param_groups, const py::dict& state) {
  size_t i = 0;
  const auto is_next = [&](const void* pointer) {
    return i < in_groups_.size() && in_groups_[i++] == pointer;
  };
  if (!walk_groups(param_groups, is_next) || i != in_groups_.size() || !state_matches(state)) {
    return false;
  }
  for (i = 0; i < entries_.size(); ++i) {
    if (i + 2 * kEntriesAhead < entries_.size()) {
      __builtin_prefetch(entries_[i + 2 * kEntriesAhead].dict);
    }
    Entry& known = entries_[i];
    if (!is_version(known.dict, known.version)) {
      if (values_of(known.dict) != values_[i]) {
        return false;
      }
      known.version = version_of(known.dict);
    }
  }
  return true;
}

}  // namespace torchopt_ext

#include "python/state_snapshot.h"

#include <algorithm>
#include <set>
#include <string>
#include <unordered_set>

#include "plan/for_each_entry.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

PyObject* interned(const std::string& name) { return PyUnicode_InternFromString(name.c_str()); }

// The names of the state entries that a step reads. Users may keep and replace other entries at
// will.
const std::vector<PyObject*> kNames = [] {
  std::set<std::string> names{"step", "master_weight", "remainder", "remainder8", "ema_weight"};
  for_each_algorithm([&](auto a) {
    for (const StateSpec& state : decltype(a)::kStates) {
      const std::string name = state.name;
      names.insert({name, name + "_codes", name + "_scale_v2"});
    }
  });
  std::vector<PyObject*> all;
  std::ranges::transform(names, std::back_inserter(all), interned);
  return all;
}();

PyObject* const kAlgorithm = interned("algorithm");

// The keys of a group that decide, if they are true, what state its parameters have.
const std::vector<PyObject*> kDeciding = [] {
  std::vector<PyObject*> all;
  for_each_algorithm([&](auto a) {
    for (const StateSpec& state : decltype(a)::kStates) {
      if (state.when != nullptr) {
        all.push_back(interned(state.when));
      }
    }
  });
  return all;
}();

// The keys of a group that decide how directions are orthogonalized
// (torchopt_ext/state/matrices.py).
const std::vector<PyObject*> kSettings = [] {
  std::vector<PyObject*> all;
  std::ranges::transform(
      std::array{"ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "flatten", "num_heads",
                 "head_dim", "split_sizes", "orthogonalize_dtype", "orthogonalize"},
      std::back_inserter(all), interned);
  return all;
}();

// Returns the index of a name in kNames; their number if a step does not read the entry.
size_t index_of(PyObject* name) {
  auto at = std::ranges::find(kNames, name);
  if (at == kNames.end() && PyUnicode_Check(name) && PyUnicode_CHECK_INTERNED(name) == 0) {
    at = std::ranges::find_if(
        kNames, [name](PyObject* read) { return PyUnicode_Compare(name, read) == 0; });
  }
  return static_cast<size_t>(at - kNames.begin());
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

constexpr std::array<char, 2> kMarks{};  // for false and true

// Calls visit(pointer) on what decides about the state of every group's parameters, and on the
// parameters, in order, until a call returns false or a group has no parameters. Returns whether
// all were visited.
template <class Visit>
bool walk_groups(const py::list& param_groups, Visit&& visit) {
  for (const py::handle group : param_groups) {
    if (!visit(PyDict_GetItem(group.ptr(), kAlgorithm))) {
      return false;
    }
    for (PyObject* key : kDeciding) {
      PyObject* value = PyDict_GetItem(group.ptr(), key);
      const int is_true = value == nullptr ? 0 : PyObject_IsTrue(value);
      if (is_true < 0) {
        throw py::error_already_set();
      }
      if (!visit(&kMarks[static_cast<size_t>(is_true)])) {
        return false;
      }
    }
    if (PyDict_GetItem(group.ptr(), kSettings.front()) != nullptr) {
      for (PyObject* key : kSettings) {
        if (!visit(PyDict_GetItem(group.ptr(), key))) {
          return false;
        }
      }
    }
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    if (params == nullptr || !(PyList_Check(params) || PyTuple_Check(params))) {
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
  for (const py::handle group : param_groups) {
    for (PyObject* key : kSettings) {
      settings_.push_back(py::reinterpret_borrow<py::object>(PyDict_GetItem(group.ptr(), key)));
    }
  }
  for (const auto& [param, entry] : state) {
    entries_.push_back({param.ptr(), entry.ptr(), version_of(entry.ptr())});
    values_.push_back(values_of(entry.ptr()));
  }
}

void StateSnapshot::expect(const std::vector<const PyObject*>& used) {
  std::unordered_set<const void*> present(in_groups_.begin(), in_groups_.end());
  for (const Values& values : values_) {
    present.insert(values.begin(), values.end());
  }
  outdated_ =
      !std::ranges::all_of(used, [&](const PyObject* object) { return present.contains(object); });
}

StateSnapshot::Values StateSnapshot::values_of(PyObject* dict) {
  Values values{};
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value) != 0;) {
    if (const size_t index = index_of(name); index < kNames.size()) {
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
  if (outdated_ || !walk_groups(param_groups, is_next) || i != in_groups_.size() ||
      !state_matches(state)) {
    return false;
  }
  for (i = 0; i < entries_.size(); ++i) {
    if (i + 2 * kEntriesAhead < entries_.size()) {
      __builtin_prefetch(entries_[i + 2 * kEntriesAhead].dict);
    }
    Entry& entry = entries_[i];
    if (!is_version(entry.dict, entry.version)) {
      if (values_of(entry.dict) != values_[i]) {
        return false;
      }
      entry.version = version_of(entry.dict);
    }
  }
  return true;
}

}  // namespace torchopt_ext

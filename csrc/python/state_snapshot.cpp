#include "python/state_snapshot.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "plan/for_each_entry.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

constexpr size_t kNames = 6;
using Names = std::array<PyObject*, kNames>;

// The state entries that a step reads; users may keep others and replace them at will. To be called
// first by a thread that holds the interpreter's lock.
const Names& read_names() {
  static const Names names = {
      PyUnicode_InternFromString("step"),          PyUnicode_InternFromString("exp_avg"),
      PyUnicode_InternFromString("exp_avg_sq"),    PyUnicode_InternFromString("max_exp_avg_sq"),
      PyUnicode_InternFromString("master_weight"), PyUnicode_InternFromString("remainder")};
  return names;
}

// Which of the names it is; kNames for any other.
size_t index_of(PyObject* name, const Names& names) {
  auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end() && PyUnicode_Check(name)) {
    found = std::find_if(names.begin(), names.end(),
                         [name](PyObject* known) { return PyUnicode_Compare(name, known) == 0; });
  }
  return static_cast<size_t>(found - names.begin());
}

// Calls visit(object) on every parameter, in order, until it returns false. Returns whether it
// never did.
template <class Visit>
bool walk_groups(const py::list& param_groups, Visit&& visit) {
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
  return true;
}

// The same for every key and entry of state.
template <class Visit>
bool walk_state(const py::dict& state, Visit&& visit) {
  PyObject* key = nullptr;
  PyObject* entry = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &entry) != 0;) {
    if (!visit(key) || !visit(entry)) {
      return false;
    }
  }
  return true;
}

// The same for the values of an entry that a step reads, as visit(which name, value). It changes
// nothing, reference counts included: several threads may walk while one holds the interpreter's
// lock for all of them.
template <class Visit>
bool walk_entry(PyObject* entry, const Names& names, const Visit& visit) {
  if (!PyDict_Check(entry)) {
    return true;
  }
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(entry, &at, &name, &value) != 0;) {
    const size_t which = index_of(name, names);
    if (which != kNames && !visit(which, value)) {
      return false;
    }
  }
  return true;
}

// A number that no other dictionary has had, nor this one before its last change (PEP 509); 0 where
// Python does not tell.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030c0000
  return PyDict_Check(dict) ? reinterpret_cast<PyDictObject*>(dict)->ma_version_tag : 0;
#else
  static_cast<void>(dict);
  return 0;
#endif
}

bool is_version(PyObject* dict, uint64_t version) {
  return version != 0 && version_of(dict) == version;
}

// Visits what should be the same objects as before.
class Compare {
 public:
  explicit Compare(const std::vector<PyObject*>& known) : known_(known) {}
  bool operator()(PyObject* object) { return next_ < known_.size() && known_[next_++] == object; }
  bool complete() const { return next_ == known_.size(); }

 private:
  const std::vector<PyObject*>& known_;
  size_t next_ = 0;
};

}  // namespace

StateSnapshot::StateSnapshot(const py::list& param_groups, const py::dict& state)
    : state_version_(version_of(state.ptr())) {
  walk_groups(param_groups, [this](PyObject* object) {
    in_groups_.push_back(object);
    return true;
  });
  walk_state(state, [this](PyObject* object) {
    in_state_.push_back(object);
    return true;
  });
  const Names& names = read_names();
  for (const auto& [key, entry] : state) {
    Entry known{entry.ptr(), version_of(entry.ptr()), values_.size(), 0};
    walk_entry(known.dict, names, [this](size_t name, PyObject* value) {
      values_.push_back({name, value});
      return true;
    });
    known.count = values_.size() - known.first;
    entries_.push_back(known);
  }
}

bool StateSnapshot::entry_matches(Entry& entry) const {
  if (is_version(entry.dict, entry.version)) {
    return true;
  }
  size_t count = 0;
  const auto is_next = [&](size_t name, PyObject* value) {
    const Value* known = count < entry.count ? &values_[entry.first + count++] : nullptr;
    return known != nullptr && known->name == name && known->object == value;
  };
  if (!walk_entry(entry.dict, read_names(), is_next) || count != entry.count) {
    return false;
  }
  entry.version = version_of(entry.dict);
  return true;
}

bool StateSnapshot::matches(const py::list& param_groups, const py::dict& state) {
  Compare groups(in_groups_);
  if (!walk_groups(param_groups, groups) || !groups.complete()) {
    return false;
  }
  if (!is_version(state.ptr(), state_version_)) {
    Compare entries(in_state_);
    if (!walk_state(state, entries) || !entries.complete()) {
      return false;
    }
    state_version_ = version_of(state.ptr());
  }
  std::atomic<bool> matching{true};
  for_each_entry(entries_.size(), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        __builtin_prefetch(entries_[i + kAhead].dict);
      }
      if (!entry_matches(entries_[i])) {
        matching = false;
        return;
      }
    }
  });
  return matching;
}

py::list StateSnapshot::objects() const {
  py::list list;
  for (const auto* objects : {&in_groups_, &in_state_}) {
    for (PyObject* object : *objects) {
      list.append(py::handle(object));
    }
  }
  for (const Value& value : values_) {
    list.append(py::handle(value.object));
  }
  return list;
}

}  // namespace torchopt_ext

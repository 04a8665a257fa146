// Notices, without hashing a single key, that an optimizer's param groups or state hold other
// objects than before: groups added, parameters swapped, entries of state replaced, cleared or
// loaded. Of a dictionary that has not changed only its version is read, where Python has one.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace torchopt_ext {

class StateSnapshot {
 public:
  // param_groups: list of dicts with a list under "params"; state: dict of dicts.
  StateSnapshot(const pybind11::list& param_groups, const pybind11::dict& state);

  bool matches(const pybind11::list& param_groups, const pybind11::dict& state);

  // Every object the snapshot compares, for Python to keep: were one freed, its address could be
  // used again. Python keeps them, and not this class, because its garbage collector must see them.
  pybind11::list objects() const;

 private:
  struct Value {
    size_t name;  // which of the names that a step reads
    PyObject* object;
  };
  // What a step reads of one parameter's state, values_[first] and on.
  struct Entry {
    PyObject* dict;
    uint64_t version;
    size_t first;
    size_t count;
  };
  bool entry_matches(Entry& entry) const;

  std::vector<PyObject*> in_groups_;
  std::vector<PyObject*> in_state_;  // keys and entries
  uint64_t state_version_;
  std::vector<Entry> entries_;
  std::vector<Value> values_;
};

}  // namespace torchopt_ext

// Notices, without hashing a single key, that an optimizer's param groups or state hold other
// objects than before: groups added, parameters swapped, entries of state replaced, cleared or
// loaded. It calls Python, so one thread that holds the interpreter's lock compares everything.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace torchopt_ext {

class StateSnapshot {
 public:
  StateSnapshot() = default;
  // param_groups: list of dicts with a list under "params"; state: dict of dicts.
  StateSnapshot(const pybind11::list& param_groups, const pybind11::dict& state);

  bool matches(const pybind11::list& param_groups, const pybind11::dict& state);

  // For the garbage collector: visits what the snapshot owns, which is all it compares. Were an
  // object freed, another could get its address.
  int traverse(visitproc visit, void* arg) const;

 private:
  struct Value {
    pybind11::object name;
    pybind11::object object;
  };
  // What a step reads of one parameter's state: values_[first, last).
  struct Entry {
    pybind11::object dict;
    uint64_t version;  // of dict, when it held these values
    pybind11::object param;
    size_t first;
    size_t last;
  };
  bool state_matches(const pybind11::dict& state);
  bool entry_matches(const Entry& entry) const;

  uint64_t state_version_ = 0;
  std::vector<pybind11::object> in_groups_;
  std::vector<Entry> entries_;
  std::vector<Value> values_;
};

}  // namespace torchopt_ext

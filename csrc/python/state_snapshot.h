// Detects, without hashing a parameter, that an optimizer's param groups or state hold other
// objects than before: groups added, parameters swapped, entries of state replaced, cleared or
// loaded. One thread that holds the GIL compares everything, because the comparison calls Python.
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

  // Visits the objects that the snapshot owns, for the garbage collector. The snapshot owns all
  // that it compares: if an object were freed, another object could get its address.
  int traverse(visitproc visit, void* arg) const;

 private:
  struct Value {
    pybind11::object name;
    pybind11::object object;
  };
  // The entries of one parameter's state that a step reads: values_[first, last).
  struct Entry {
    pybind11::object dict;
    uint64_t version;  // version of dict with these values
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

// Detects, without hashing a parameter, that an optimizer's param groups or state hold other
// objects than before: groups added, parameters swapped, entries of state replaced, cleared or
// loaded. One thread that holds the GIL compares everything, because the comparison calls Python.
//
// The snapshot owns nothing, so that what a user drops is freed at once. It follows no address that
// it remembers before it has found the address in the groups or the state again, which own what
// lies there. It may be another object, at the address of one that was freed: the plan checks the
// properties of the objects in every step.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>
#include <vector>

#include "kernels/algorithms.h"

namespace torchopt_ext {

class StateSnapshot {
 public:
  // param_groups: list of dicts with a list under "params"; state: dict of dicts.
  StateSnapshot(const pybind11::list& param_groups, const pybind11::dict& state);

  // Another thread may have replaced an object between the caller's read and the snapshot. If one
  // of `used` is neither in the groups nor in the state, no state matches the snapshot.
  void expect(const std::vector<const PyObject*>& used);

  bool matches(const pybind11::list& param_groups, const pybind11::dict& state);

 private:
  // The most names of entries that a step reads: of step and masters, and of each state itself, its
  // codes and its scales.
  static constexpr size_t kMostRead = [] {
    size_t names = 4;
    for_each_algorithm([&](auto a) { names += 3 * std::size(decltype(a)::kStates); });
    return names;
  }();
  using Values = std::array<PyObject*, kMostRead>;  // by name; null where absent
  // One parameter's state.
  struct Entry {
    const PyObject* param;
    PyObject* dict;
    uint64_t version;  // version of dict with the values below
  };
  bool state_matches(const pybind11::dict& state);
  static Values values_of(PyObject* dict);

  bool outdated_ = false;
  uint64_t state_version_ = 0;
  std::vector<const void*> in_groups_;
  std::vector<pybind11::object> settings_;  // owned: another value must not get the address of one
  std::vector<Entry> entries_;
  std::vector<Values> values_;  // by entry; beside the entries, which a step mostly reads alone
};

}  // namespace torchopt_ext

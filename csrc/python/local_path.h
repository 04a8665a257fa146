// From a parameter to the plain tensor that this rank steps: a DTensor's shard, the inner tensor of
// a wrapper subclass, or both. optim/local.py's local_tensor() chooses it when a plan is built; a
// step only follows the attributes again.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>

namespace torchopt_ext {

struct LocalPath {
  std::array<PyObject*, 2> attributes{};  // interned names, never freed; those used come first
  bool distributed = false;               // begins at a DTensor

  pybind11::object follow(PyObject* param) const;
  bool operator==(const LocalPath&) const = default;
};

// Raises if `local` is not what attributes of `param` lead to.
LocalPath local_path(pybind11::handle param, pybind11::handle local);

// The local tensor of a DTensor's gradient if it is placed as the parameter and complete; else
// None.
pybind11::object plain_local_gradient(PyObject* param, PyObject* gradient);

}  // namespace torchopt_ext

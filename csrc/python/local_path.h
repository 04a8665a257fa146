// The path from a parameter or state entry to the plain tensor that this rank steps: a DTensor's
// shard, the inner tensor of a wrapper subclass, the inner tensor of a shard, or a shard's copy in
// low precision (torchopt_ext/fsdp.py). local_tensor() (state/local.py) chooses the tensor when a
// plan is built; a step only follows the attributes again.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>

namespace torchopt_ext {

struct LocalPath {
  std::array<PyObject*, 2> attributes{};  // interned names, never freed; used names first
  bool distributed = false;               // the object is a DTensor

  bool empty() const { return attributes[0] == nullptr; }  // leads to the object itself
  // Raises if an attribute is missing.
  pybind11::object follow(PyObject* object) const;
};

// Returns the path from `object` to `local`. Raises if no attributes of `object` lead to `local`.
LocalPath local_path(pybind11::handle object, pybind11::handle local);

// Returns a DTensor gradient's local tensor if the gradient is placed as the parameter and no
// collective on it is pending; else None.
pybind11::object plain_local_gradient(PyObject* param, PyObject* gradient);

}  // namespace torchopt_ext

// What the files that add functions to the Python module share. They document each function at its
// definition.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchopt_ext {

// Returns item `i`. Raises if the item is not a tensor.
const at::Tensor& tensor_at(const pybind11::list& tensors, size_t i);

void add_carve(pybind11::module_& m);
void add_param_lists(pybind11::module_& m);

}  // namespace torchopt_ext

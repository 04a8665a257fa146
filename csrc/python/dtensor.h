// What a step reads of DTensors, without calling into Python's torch.distributed.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchopt_ext {

// A DTensor's local tensor as it is now. Raises if the object has none.
pybind11::object local_tensor(PyObject* dtensor);

// The local tensor of a DTensor's gradient that is placed as its parameter is and complete, which
// most are; None otherwise. Two gradients of a mesh share its object, their placements may differ.
pybind11::object plain_local_gradient(PyObject* param, PyObject* gradient);

}  // namespace torchopt_ext

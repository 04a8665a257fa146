// A param group's hyperparameters, as a step reads them each time.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "work/passes.h"

namespace torchopt_ext {

// The arguments of a param group, under the keys of torch.optim.AdamW. Raises if one is missing, of
// another type, or a learning rate that `device` cannot read.
GroupHyper read_group(pybind11::handle group, at::Device device);

}  // namespace torchopt_ext

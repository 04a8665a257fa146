// What cpu/passes.h and cuda/passes.h take besides a work list: arguments that hold tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/adam.h"

namespace torchopt_ext {

// A learning rate held in a tensor; replaces AdamHyper::lr when defined.
struct GroupHyper {
  AdamHyper adam;
  at::Tensor lr;
};

// What a tracked step reports of its tensors, on the plan's device; see ChunkTrace.
struct Traces {
  at::Tensor chunks;  // int64[chunks, 4]: a ChunkTrace each
  at::Tensor norms;   // float64[tensors, 2]: of the unscaled gradient, of the update
  at::Tensor counts;  // int64[tensors, 2]: lost updates, digest
};

}  // namespace torchopt_ext

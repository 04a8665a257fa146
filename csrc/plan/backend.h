// What a device offers to a step plan: the two passes and the control between them. The CPU and
// CUDA back ends register one each, so that the plan depends on neither.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/adam_args.h"
#include "kernels/control.h"
#include "plan/chunk_table.h"

namespace torchopt_ext {

// A learning rate held in a tensor; replaces AdamHyper::lr when defined.
struct GroupHyper {
  AdamHyper adam;
  at::Tensor lr;
};

struct WorkList {
  std::vector<TensorWork> tensors;
  std::vector<Chunk> chunks;
  std::vector<int64_t> cumulative;  // cumulative_bytes
};

struct Backend {
  // Pass A: adds the gradients' squares to the accumulator (int64[70]).
  void (*sum_of_squares)(const WorkList& work, const at::Tensor& accumulator);
  at::Tensor (*accumulator_total)(const at::Tensor& accumulator);
  void (*control_update)(const at::Tensor& control, const at::Tensor& accumulator,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf);
  // Pass B: advances step counts and updates every tensor that has a gradient, unless the control
  // block says skip.
  void (*adam)(const WorkList& work, const std::vector<GroupHyper>& groups,
               const at::Tensor& control);
};

void register_backend(at::DeviceType device, const Backend& backend);

// Raises if the library was built without this device.
const Backend& backend_for(at::Device device);

}  // namespace torchopt_ext

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

// What a tracked step reports of its tensors, on the plan's device; see ChunkTrace.
struct Traces {
  at::Tensor chunks;  // int64[chunks, 4]: a ChunkTrace each
  at::Tensor norms;   // float64[tensors, 2]: of the unscaled gradient, of the update
  at::Tensor counts;  // int64[tensors, 2]: lost updates, digest
};

// A back end's copy of a work list's tables, kept between steps; null where it needs none.
struct DeviceTables {
  virtual ~DeviceTables() = default;
};

struct WorkList {
  std::vector<TensorWork> tensors;
  std::vector<Chunk> chunks;
  std::vector<int64_t> cumulative;  // cumulative_bytes
  StepOptions options;
  mutable std::shared_ptr<DeviceTables> device_tables;
};

struct Backend {
  // Pass A: adds the gradients' squares to the accumulator (int64[70]), whose digits are left as
  // the blocks' sums make them unless `normalize`.
  void (*sum_of_squares)(const WorkList& work, const at::Tensor& accumulator, bool normalize);
  void (*clear)(const at::Tensor& accumulator);
  at::Tensor (*accumulator_total)(const at::Tensor& accumulator);
  void (*control_update)(const at::Tensor& control, const at::Tensor& accumulator,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf);
  // After a step whose scale belongs to a scaler: `scale`, one float32 element, becomes the block's
  // loss scale, follows `found_inf`, one float32 or float64 element, and is written back.
  void (*loss_scale_update)(const at::Tensor& control, const at::Tensor& found_inf,
                            const at::Tensor& scale);
  // Pass B: advances step counts and updates every tensor that has a gradient, unless the control
  // block says skip. Fills `traces` if the options ask for it.
  void (*adam)(const WorkList& work, const std::vector<GroupHyper>& groups,
               const at::Tensor& control, const Traces& traces);
  // Every `param` of the list becomes its `grad`, times grad_factor if `unscale`, unless the
  // control block says skip.
  void (*scaled_copy)(const WorkList& work, const at::Tensor& control, bool unscale);
};

void register_backend(at::DeviceType device, const Backend& backend);

// Raises if the library was built without this device.
const Backend& backend_for(at::Device device);

}  // namespace torchopt_ext

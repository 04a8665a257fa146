// The passes of a step, on the CPU and on CUDA devices, and their arguments besides a work list.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/schedule.h"
#include "work/staging.h"
#include "work/work_list.h"

namespace torchopt_ext {

// A param group's arguments. A learning rate held in a tensor, if defined, replaces the number.
struct GroupHyper {
  Algorithm algorithm{};
  Hyper hyper{};
  at::Tensor lr;
};

// The report of a tracked step for its tensors, on the plan's device; see ChunkTrace.
struct Traces {
  at::Tensor chunks;  // int64[chunks, 3]: one ChunkTrace per row
  at::Tensor norms;   // float64[tensors, 2]: norms of the unscaled gradient and of the update
  at::Tensor lost;    // int64[tensors]: lost updates
};

// Returns traces for the tensors and chunks of a list.
Traces new_traces(const WorkList& work, at::Device device);

// The functions of a back end: one call for all tensors. A CUDA function waits for the
// device only in the first upload of a plan while a graph is captured.
struct Passes {
  // Pass A: adds the gradients' squares to the accumulator (int64[70]). On CUDA its digits are not
  // normalized unless `normalize` is set.
  void (*sum_of_squares)(const WorkList& work, const at::Tensor& accumulator, bool normalize);
  void (*clear)(const at::Tensor& accumulator);
  at::Tensor (*accumulator_total)(const at::Tensor& accumulator);
  void (*control_update)(const at::Tensor& control, const at::Tensor& accumulator,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf);
  // Updates a scaler's scale after a step. `scale`, one float32 element, becomes the block's loss
  // scale, follows `found_inf`, one float32 or float64 element, and is written back.
  void (*loss_scale_update)(const at::Tensor& control, const at::Tensor& found_inf,
                            const at::Tensor& scale);
  // Allocates what update() needs on the device. A step over several lists prepares all of them
  // before it updates one: a lack of memory then changes nothing.
  void (*prepare)(const WorkList& work, at::Device device);
  // Pass B: advances step counts and updates every tensor that has a gradient, unless the control
  // block says skip. Fills `traces` if the options ask for it.
  void (*update)(const WorkList& work, const std::vector<GroupHyper>& groups,
                 const at::Tensor& control, const Traces& traces);
  // Copies every `grad` of the list to its `param`, times grad_factor if `unscale`, unless the
  // control block says skip.
  void (*scaled_copy)(const WorkList& work, const at::Tensor& control, bool unscale);
  // Adds the digest of each array (kernels/digest.h) to its element of `digests` (int64).
  void (*digest)(const WorkList& arrays, const at::Tensor& digests);
  // Returns the schedule's factor after each of `steps` (int64), as float64.
  at::Tensor (*lr_factors)(const Schedule& schedule, const at::Tensor& steps);
  // Returns streams for staged states (staging.h).
  std::unique_ptr<StagingStreams> (*staging_streams)(at::Device device);
  // Lets kernels of the device access pages of the host's memory (host_memory.h).
  void (*lock_pages)(void* memory, size_t bytes, at::Device device);
  // Returns false if the device may still use the pages, which must then stay.
  bool (*unlock_pages)(void* memory, size_t bytes, at::Device device);
};

namespace cpu {
const Passes& passes();
}
namespace cuda {
const Passes& passes();  // raises in a build without CUDA (absent.cpp)
}

// Returns torch's name of a dtype for messages, such as "float16".
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// The reals in a tensor's memory: a complex tensor is stepped as its view_as_real().
inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "dtype ", dtype_name(tensor.scalar_type()), " is not supported");
  }
}

inline int64_t reals_per_element(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

// Chooses between the back ends. Raises if there is none for the device.
inline const Passes& passes_on(at::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "torchopt_ext has no support for ",
              device.type(), " tensors, expected tensors on the CPU or on a CUDA device");
  return device.is_cuda() ? cuda::passes() : cpu::passes();
}

}  // namespace torchopt_ext

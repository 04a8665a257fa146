// The CUDA back end of a step, and the step operators for CUDA tensors. Nothing here waits for the
// device: tables go up through pinned memory, and every scalar a kernel needs is read on the
// device.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstring>

#include "cuda/launch.h"
#include "plan/backend.h"
#include "plan/tensor_checks.h"
#include "schedule_args.h"
#include "step_ops.h"

namespace torchopt_ext {
namespace {

// A copy of plain values in the device's memory; kept alive by the returned tensor, whose memory
// the caching allocator reuses in stream order.
template <class T>
at::Tensor upload(const std::vector<T>& values, at::Device device) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  if (bytes > 0) {
    std::memcpy(pinned.data_ptr(), values.data(), static_cast<size_t>(bytes));
  }
  return pinned.to(device, /*non_blocking=*/true);
}

template <class T>
const T* as(const at::Tensor& table) {
  return static_cast<const T*>(table.const_data_ptr());
}

void sum_of_squares(const WorkList& work, const at::Tensor& accumulator) {
  if (work.chunks.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(accumulator.device());
  const at::Tensor tensors = upload(work.tensors, accumulator.device());
  const at::Tensor chunks = upload(work.chunks, accumulator.device());
  launch_sum_of_squares(
      {as<TensorWork>(tensors), as<Chunk>(chunks), accumulator.data_ptr<int64_t>()},
      static_cast<int64_t>(work.chunks.size()), at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor total(const at::Tensor& accumulator) {
  const c10::cuda::CUDAGuard guard(accumulator.device());
  at::Tensor sum = at::empty({}, accumulator.options().dtype(at::kDouble));
  launch_accumulator_total(accumulator.const_data_ptr<int64_t>(), sum.data_ptr<double>(),
                           at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sum;
}

void control_update_cuda(const at::Tensor& control, const at::Tensor& accumulator,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf) {
  const c10::cuda::CUDAGuard guard(control.device());
  launch_control_update(
      static_cast<Control*>(control.data_ptr()), accumulator.const_data_ptr<int64_t>(),
      grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
      found_inf ? found_inf->const_data_ptr<float>() : nullptr, at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void adam(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control) {
  if (work.tensors.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(control.device());
  std::vector<GroupArgs> args;
  for (const GroupHyper& group : groups) {
    GroupArgs arg{group.adam, nullptr, DType::kFloat64};
    if (group.lr.defined() && group.lr.is_cpu()) {
      arg.hyper.lr = group.lr.item<double>();
    } else if (group.lr.defined()) {
      arg.lr = group.lr.const_data_ptr();
      arg.lr_dtype = dtype_of(group.lr);
    }
    args.push_back(arg);
  }
  const at::Tensor tensors = upload(work.tensors, control.device());
  const at::Tensor chunks = upload(work.chunks, control.device());
  const at::Tensor group_table = upload(args, control.device());
  launch_adam({as<TensorWork>(tensors), as<Chunk>(chunks), as<GroupArgs>(group_table),
               as<Control>(control), static_cast<int64_t>(work.tensors.size())},
              static_cast<int64_t>(work.chunks.size()), at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// A negative step is a caller's error that only the host could see; it counts as warm-up.
at::Tensor lr_factor_tensor(const at::Tensor& step, int64_t warmup_steps, int64_t stable_steps,
                            int64_t decay_steps, c10::string_view decay_type, double min_factor,
                            int64_t generation) {
  const Schedule schedule =
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation);
  TORCH_CHECK(step.scalar_type() == at::kLong, "step has dtype ", step.scalar_type(),
              ", expected int64");
  const c10::cuda::CUDAGuard guard(step.device());
  const at::Tensor steps = step.contiguous();
  at::Tensor factors = at::empty(step.sizes(), step.options().dtype(at::kDouble));
  if (steps.numel() > 0) {
    launch_lr_factor(schedule, steps.const_data_ptr<int64_t>(), factors.data_ptr<double>(),
                     steps.numel(), at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return factors;
}

const bool registered = [] {
  register_backend(at::kCUDA, {sum_of_squares, total, control_update_cuda, adam});
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(torchopt_ext, CUDA, m) {
  register_step_ops(m);
  m.impl("lr_factor.tensor", lr_factor_tensor);
}

}  // namespace torchopt_ext

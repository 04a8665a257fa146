// Nothing here waits for the device: tables go up through pinned memory when they change, and every
// scalar a kernel needs is read on the device.
#include "cuda/passes.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "cuda/device_table.h"
#include "cuda/launch.h"
#include "plan/tensor_checks.h"

namespace torchopt_ext::cuda {
namespace {

struct CudaTables : DeviceTables {
  DeviceTable tensors;
  DeviceTable chunks;
  DeviceTable groups;
  DeviceTable scalars;
};

CudaTables& tables_of(const WorkList& work) {
  if (work.device_tables == nullptr) {
    work.device_tables = std::make_shared<CudaTables>();
  }
  return static_cast<CudaTables&>(*work.device_tables);
}

}  // namespace

void sum_of_squares(const WorkList& work, const at::Tensor& accumulator, bool normalize) {
  const c10::cuda::CUDAGuard guard(accumulator.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  auto* digits = accumulator.data_ptr<int64_t>();
  if (!work.chunks.empty()) {
    CudaTables& tables = tables_of(work);
    launch_sum_of_squares(
        {tables.tensors.upload(work.tensors, stream), tables.chunks.upload(work.chunks, stream),
         static_cast<int64_t>(work.chunks.size()), digits},
        stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (normalize) {
    launch_accumulator_normalize(digits, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

void clear(const at::Tensor& accumulator) {
  const c10::cuda::CUDAGuard guard(accumulator.device());
  C10_CUDA_CHECK(cudaMemsetAsync(accumulator.data_ptr(), 0, sizeof(ExactAccumulator),
                                 at::cuda::getCurrentCUDAStream()));
}

at::Tensor accumulator_total(const at::Tensor& accumulator) {
  const c10::cuda::CUDAGuard guard(accumulator.device());
  at::Tensor sum = at::empty({}, accumulator.options().dtype(at::kDouble));
  launch_accumulator_total(accumulator.const_data_ptr<int64_t>(), sum.data_ptr<double>(),
                           at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sum;
}

void control_update(const at::Tensor& control, const at::Tensor& accumulator,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  const c10::cuda::CUDAGuard guard(control.device());
  launch_control_update(
      static_cast<Control*>(control.data_ptr()), accumulator.const_data_ptr<int64_t>(),
      grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
      found_inf ? found_inf->const_data_ptr<float>() : nullptr, at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void loss_scale_update(const at::Tensor& control, const at::Tensor& found_inf,
                       const at::Tensor& scale) {
  const c10::cuda::CUDAGuard guard(control.device());
  launch_loss_scale_update(static_cast<Control*>(control.data_ptr()), found_inf.const_data_ptr(),
                           dtype_of(found_inf), scale.data_ptr<float>(),
                           at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

// A learning rate in a CPU tensor is read here, one on the device by the device.
std::vector<GroupArgs> group_args(const std::vector<GroupHyper>& groups) {
  std::vector<GroupArgs> all(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    all[i].hyper = groups[i].adam;
    const at::Tensor& lr = groups[i].lr;
    if (lr.defined() && lr.is_cpu()) {
      all[i].hyper.lr = lr.item<double>();
    } else if (lr.defined()) {
      all[i].lr = lr.const_data_ptr();
      all[i].lr_dtype = dtype_of(lr);
    }
  }
  return all;
}

}  // namespace

void adam(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control,
          const Traces& traces) {
  if (work.tensors.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(control.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  CudaTables& tables = tables_of(work);
  AdamArgs args{};
  args.tensors = tables.tensors.upload(work.tensors, stream);
  args.groups = tables.groups.upload(group_args(groups), stream);
  args.scalars = static_cast<TensorScalars*>(
      tables.scalars.reserve(work.tensors.size() * sizeof(TensorScalars), stream));
  args.control = static_cast<const Control*>(control.const_data_ptr());
  args.tensor_count = static_cast<int64_t>(work.tensors.size());
  args.chunk_count = static_cast<int64_t>(work.chunks.size());
  args.options = work.options;
  launch_prepare(args, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (!work.chunks.empty()) {
    args.chunks = tables.chunks.upload(work.chunks, stream);
    if (work.options.track != 0) {
      args.traces = static_cast<ChunkTrace*>(traces.chunks.data_ptr());
    }
    const auto in_double = static_cast<size_t>(
        std::count_if(work.tensors.begin(), work.tensors.end(), computed_in<double>));
    if (in_double < work.tensors.size()) {
      launch_adam<float>(args, stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (in_double > 0) {
      launch_adam<double>(args, stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
  if (work.options.track != 0) {
    args.norms = traces.norms.data_ptr<double>();
    args.counts = traces.counts.data_ptr<int64_t>();
    launch_sum_traces(args, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

void scaled_copy(const WorkList& work, const at::Tensor& control, bool unscale) {
  if (work.chunks.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(control.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  CudaTables& tables = tables_of(work);
  launch_scaled_copy(
      {tables.tensors.upload(work.tensors, stream), tables.chunks.upload(work.chunks, stream),
       static_cast<const Control*>(control.const_data_ptr()),
       static_cast<int64_t>(work.chunks.size()), unscale},
      stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// A negative step is a caller's error that only the host could see; it counts as warm-up.
at::Tensor lr_factors(const Schedule& schedule, const at::Tensor& steps) {
  const c10::cuda::CUDAGuard guard(steps.device());
  at::Tensor factors = at::empty(steps.sizes(), steps.options().dtype(at::kDouble));
  if (steps.numel() > 0) {
    launch_lr_factor(schedule, steps.const_data_ptr<int64_t>(), factors.data_ptr<double>(),
                     steps.numel(), at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return factors;
}

}  // namespace torchopt_ext::cuda

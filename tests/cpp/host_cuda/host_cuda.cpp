// The CUDA back end on the host, in place of the CPU's: csrc/cuda/passes.cpp runs with tables in
// the host's memory, and launches run the kernels' bodies in loops over grid, block and thread.
// Tests of the CPU then check the CUDA back end without a GPU (make test-host-cuda).
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "../host_cta.h"
#include "cpu/float_mode.h"
#include "cuda/control.h"
#include "cuda/copy.h"
#include "cuda/device_table.h"
#include "cuda/digest.h"
#include "cuda/norm.h"
#include "cuda/traced.h"
#include "work/passes.h"

namespace torchopt_ext {

const Passes& cpu::passes() { return cuda::passes(); }

// ---- tables -----------------------------------------------------------------------------------
// A test may limit the number of further tables.
void DeviceTable::reserve(size_t bytes) {
  if (const char* left = std::getenv("HOST_CUDA_TABLES")) {
    TORCH_CHECK_WITH(OutOfMemoryError, left != std::string("0"), "no memory for a table");
    setenv("HOST_CUDA_TABLES", std::to_string(std::stoi(left) - 1).c_str(), 1);
  }
  memory_ = c10::GetCPUAllocator()->allocate(bytes);
  std::memset(memory_.get(), 0xff, bytes);  // NaN, and addresses that cannot be read
}

void DeviceTable::upload(const void* values, size_t bytes, c10::cuda::CUDAStream) {
  reserve(bytes);
  std::memcpy(memory_.get(), values, bytes);
}

void* DeviceTable::record_use(c10::cuda::CUDAStream) { return memory_.get(); }

void keep_with_graph(const std::shared_ptr<void>&, c10::cuda::CUDAStream) {}

// ---- launches ---------------------------------------------------------------------------------
namespace {

// A launch, as CUDA checks it. A GPU's arithmetic does not follow the host's rounding mode.
struct Launch {
  Launch(int64_t blocks, cudaStream_t stream) {
    TORCH_INTERNAL_ASSERT(blocks > 0 && blocks <= INT32_MAX, "a grid of ", blocks, " blocks");
    TORCH_INTERNAL_ASSERT(stream == c10::cuda::CUDAStream{}, "not the current stream");
  }
  const FloatMode mode;
};
template <class F>
void for_each_block(int64_t blocks, int threads, cudaStream_t stream, const F& f) {
  const Launch launch(blocks, stream);
  for (int64_t block = 0; block < blocks; ++block) {
    f(HostCta{block, blocks, threads});
  }
}

}  // namespace

template <int kTensors>
void launch_norm(const NormArgs& args, const GradientsOf<kTensors>& gradients, int multiprocessors,
                 cudaStream_t stream) {
  const int64_t blocks = (args.chunk_count + kNormWarps - 1) / kNormWarps;
  for_each_block(std::min<int64_t>(blocks, multiprocessors), kNormThreads, stream,
                 [&](const HostCta& cta) {
                   NormShared shared;
                   norm_body(cta, shared, args, gradients);
                 });
}
template void launch_norm(const NormArgs&, const Gradients&, int, cudaStream_t);
template void launch_norm(const NormArgs&, const SomeGradients&, int, cudaStream_t);
template void launch_norm(const NormArgs&, const FewGradients&, int, cudaStream_t);

void launch_normalize(int64_t* accumulator, cudaStream_t stream) {
  const Launch launch(1, stream);
  normalize_body(HostWarp{}, accumulator);
}

void launch_total(const int64_t* accumulator, double* total, cudaStream_t stream) {
  const Launch launch(1, stream);
  SharedLimbs limbs;
  *total = warp_total(HostWarp{}, accumulator, limbs);
}

void launch_control_update(Control* control, const int64_t* accumulator, const float* grad_scale,
                           const float* found_inf, cudaStream_t stream) {
  const Launch launch(1, stream);
  SharedLimbs limbs;
  control_update_body(HostWarp{}, limbs, control, accumulator, grad_scale, found_inf);
}

void launch_loss_scale_update(Control* control, const void* found_inf, DType found_inf_dtype,
                              float* scale, cudaStream_t stream) {
  const Launch launch(1, stream);
  scaler_update(*control, read_number(found_inf, found_inf_dtype) != 0.0, *scale);
}

void launch_lr_factor(const Schedule& schedule, const int64_t* steps, double* factors, int64_t n,
                      cudaStream_t stream) {
  const Launch launch((n + 255) / 256, stream);
  std::transform(steps, steps + n, factors,
                 [&](int64_t step) { return lr_factor(schedule, step); });
}

void launch_copy(const CopyArgs& args, int64_t chunk_count, cudaStream_t stream) {
  for_each_block(chunk_count, kCopyThreads, stream,
                 [&](const HostCta& cta) { copy_body(cta, args); });
}

void launch_digest(const DigestArgs& args, cudaStream_t stream) {
  constexpr int64_t kWarps = kDigestBlock / kWarpThreads;
  for_each_block((args.chunk_count + kWarps - 1) / kWarps, kDigestBlock, stream,
                 [&](const HostCta& cta) { digest_body(cta, args); });
}

template <int kTensors>
void launch_prepare(const UpdateArgs& args, const GradientsOf<kTensors>& gradients,
                    const ParamGroups& groups, cudaStream_t stream) {
  const Launch launch(gradients.count, stream);
  for (int i = 0; i < gradients.count; ++i) {
    prepare_body(i, args, gradients, groups);
  }
}
template void launch_prepare(const UpdateArgs&, const Gradients&, const ParamGroups&, cudaStream_t);
template void launch_prepare(const UpdateArgs&, const SomeGradients&, const ParamGroups&,
                             cudaStream_t);
template void launch_prepare(const UpdateArgs&, const FewGradients&, const ParamGroups&,
                             cudaStream_t);

void launch_update(Kind kind, const UpdateArgs& args, int64_t chunk_count, cudaStream_t stream) {
  for_each_block(chunk_count, kUpdateThreads, stream, [&](const HostCta& cta) {
    with_kind(kind, [&](auto constant) { pass_b_body<constant()>(cta, args); });
  });
}

void launch_traced(Kind kind, const UpdateArgs& args, const TraceArgs& traces, int64_t chunk_count,
                   cudaStream_t stream) {
  for_each_block(chunk_count, kUpdateThreads, stream, [&](const HostCta& cta) {
    TracedShared shared;
    with_kind(kind, [&](auto constant) { traced_body<constant()>(cta, shared, args, traces); });
  });
}

void launch_sum_traces(int64_t tensor_count, const UpdateArgs& args, const TraceArgs& traces,
                       cudaStream_t stream) {
  const Launch launch(tensor_count, stream);
  for (int64_t i = 0; i < tensor_count; ++i) {
    ReportShared shared;
    sum_traces_body(HostWarp{}, shared, i, args, traces);
  }
}

}  // namespace torchopt_ext

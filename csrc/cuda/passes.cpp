// Nothing here waits for the device, except the first upload during a graph's capture
// (device_table.cpp). Tables are uploaded through pinned memory when a work list is first run,
// gradients and hyperparameters are kernel parameters, and kernels read all other scalars on the
// device.
#include "work/passes.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cpu/float_mode.h"
#include "cuda/average.h"
#include "cuda/control.h"
#include "cuda/copy.h"
#include "cuda/device_table.h"
#include "cuda/digest.h"
#include "cuda/host_memory.h"
#include "cuda/norm.h"
#include "cuda/staging.h"
#include "cuda/traced.h"
#include "cuda/update_chunks.h"
#include "work/host_memory.h"

namespace torchopt_ext::cuda {
namespace {

// Elements that a block of threads copies.
constexpr int64_t kCopyChunk = 8192;

// The tables that the passes over a work list keep on its device.
struct CudaTables {
  DeviceTable tensors;
  DeviceTable steps;
  DeviceTable norm_chunks;
  std::vector<int64_t> first_norm_chunk;  // by range of kMostTensors tensors
  DeviceTable chunks;
  std::array<int64_t, kKinds + 1> first_chunk{};  // by kind
  DeviceTable first_of_tensor;                    // for tracking: the first chunk of each tensor
  DeviceTable average_chunks;                     // of tensors with moving averages
  int64_t average_count = 0;
};

CudaTables& tables_of(const WorkList& work, c10::cuda::CUDAStream stream) {
  if (work.device_tables == nullptr) {
    auto tables = std::make_shared<CudaTables>();
    tables->tensors.upload(work.tensors, stream);
    work.device_tables = std::move(tables);
  }
  keep_with_graph(work.device_tables, stream);
  return *static_cast<CudaTables*>(work.device_tables.get());
}

// Fills the table with the chunks of one kind after another. Tracking uses the CPU's chunks.
void fill_chunks(const WorkList& work, const UpdateChunks& cut, CudaTables& tables,
                 c10::cuda::CUDAStream stream) {
  if (work.options.track != 0) {
    tables.chunks.upload(work.chunks, stream);
    return;
  }
  std::vector<Chunk> chunks;
  for (size_t kind = 0; kind < kKinds; ++kind) {
    cut.add([=](const TensorWork& tensor) { return static_cast<size_t>(tensor.kind) == kind; },
            chunks);
    tables.first_chunk[kind + 1] = static_cast<int64_t>(chunks.size());
  }
  tables.chunks.upload(chunks, stream);
}

// Fills the table with the chunks of tensors that have moving averages.
void fill_average_chunks(const UpdateChunks& cut, CudaTables& tables,
                         c10::cuda::CUDAStream stream) {
  std::vector<Chunk> chunks;
  cut.add([](const TensorWork& tensor) { return tensor.memory[kEma] != nullptr; }, chunks);
  tables.average_count = static_cast<int64_t>(chunks.size());
  if (!chunks.empty()) {
    tables.average_chunks.upload(chunks, stream);
  }
}

// Returns the number of blocks of which each does `each` of n.
int64_t blocks_for(int64_t n, int64_t each) { return (n + each - 1) / each; }

// Launches a kernel on the current stream and checks that it was launched.
template <class Kernel>
void launch_checked(const Kernel& kernel, int64_t blocks) {
  launch(kernel, blocks, at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f(kernel) for each range of tensors, with kernel.gradients set to those of the range.
template <class Kernel, class F>
void for_each_range_of(const WorkList& work, const F& f) {
  Kernel kernel;
  constexpr int32_t kMost = decltype(kernel.gradients)::kMost;
  const auto n = static_cast<int32_t>(work.tensors.size());
  for (int32_t first = 0; first < n; first += kMost) {
    kernel.gradients.first = first;
    kernel.gradients.count = std::min(kMost, n - first);
    const TensorWork* tensors = work.tensors.data() + first;
    for (int32_t i = 0; i < kernel.gradients.count; ++i) {
      kernel.gradients.memory[i] = tensors[i].memory[kGrad];
    }
    f(kernel);
  }
}
template <template <int> class Kernel, class F>
void for_each_range(const WorkList& work, const F& f) {
  if (work.tensors.size() <= kFewTensors) {
    for_each_range_of<Kernel<kFewTensors>>(work, f);
  } else if (work.tensors.size() <= kSomeTensors) {
    for_each_range_of<Kernel<kSomeTensors>>(work, f);
  } else {
    for_each_range_of<Kernel<kMostTensors>>(work, f);
  }
}

void sum_of_squares(const WorkList& work, const at::Tensor& accumulator, bool normalize) {
  const c10::cuda::CUDAGuard guard(accumulator.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  auto* digits = accumulator.data_ptr<int64_t>();
  if (!work.chunks.empty()) {
    CudaTables& tables = tables_of(work, stream);
    if (tables.norm_chunks.empty()) {
      const std::vector<Chunk> norm_chunks = make_chunks(work.tensors, kBlockElements);
      tables.first_norm_chunk = first_chunks(norm_chunks, work.tensors.size(), kMostTensors);
      tables.norm_chunks.upload(norm_chunks, stream);
    }
    const int multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const auto* chunks = tables.norm_chunks.address<const Chunk>(stream);
    for_each_range<NormKernel>(work, [&]<int kTensors>(NormKernel<kTensors>& kernel) {
      const auto range = static_cast<size_t>(kernel.gradients.first / kMostTensors);
      const int64_t first = tables.first_norm_chunk[range];
      kernel.tensors = tables.tensors.address<const TensorWork>(stream);
      kernel.chunks = chunks + first;
      kernel.chunk_count = tables.first_norm_chunk[range + 1] - first;
      kernel.accumulator = digits;
      if (kernel.chunk_count > 0) {
        // At most as many blocks as the device runs at once, because each ends with atomics.
        const int64_t most = int64_t{kernel.kBlocks} * multiprocessors;
        launch_checked(kernel, std::min(blocks_for(kernel.chunk_count, kernel.kWarps), most));
      }
    });
  }
  if (normalize) {
    launch_checked(NormalizeKernel{{}, digits}, 1);
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
  launch_checked(TotalKernel{{}, accumulator.const_data_ptr<int64_t>(), sum.data_ptr<double>()}, 1);
  return sum;
}

void control_update(const at::Tensor& control, const at::Tensor& accumulator,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  const c10::cuda::CUDAGuard guard(control.device());
  launch_checked(ControlUpdateKernel{{},
                                     static_cast<Control*>(control.data_ptr()),
                                     accumulator.const_data_ptr<int64_t>(),
                                     grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
                                     found_inf ? found_inf->const_data_ptr<float>() : nullptr},
                 1);
}

void loss_scale_update(const at::Tensor& control, const at::Tensor& found_inf,
                       const at::Tensor& scale) {
  const c10::cuda::CUDAGuard guard(control.device());
  launch_checked(LossScaleUpdateKernel{{},
                                       static_cast<Control*>(control.data_ptr()),
                                       found_inf.const_data_ptr(),
                                       dtype_of(found_inf),
                                       scale.data_ptr<float>()},
                 1);
}

// Reads learning rates in CPU tensors. Kernels read learning rates on the device.
std::vector<ParamGroups> group_ranges(const std::vector<GroupHyper>& groups, at::Device device) {
  const FloatMode mode;  // item() of a float32
  std::vector<ParamGroups> ranges;
  for (const GroupHyper& group : groups) {
    if (ranges.empty() || ranges.back().count == ParamGroups::kMost) {
      const size_t first = ParamGroups::kMost * ranges.size();
      ranges.emplace_back().first = static_cast<int32_t>(first);
    }
    ParamGroupArgs& args = ranges.back().group[ranges.back().count++];
    args.algorithm = group.algorithm;
    args.hyper = group.hyper;
    if (group.lr.defined() && group.lr.device() == device) {
      args.lr = group.lr.const_data_ptr();
      args.lr_dtype = dtype_of(group.lr);
    } else if (group.lr.defined()) {
      args.hyper.value[kLr] = group.lr.item<double>();
    }
  }
  return ranges;
}

void launch_updates(const CudaTables& tables, UpdateArgs args, c10::cuda::CUDAStream stream) {
  for (size_t kind = 0; kind < kKinds; ++kind) {
    const int64_t count = tables.first_chunk[kind + 1] - tables.first_chunk[kind];
    if (count > 0) {
      launch_update(static_cast<Kind>(kind), args, count, stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      args.chunks += count;
    }
  }
}

void launch_tracked(const WorkList& work, CudaTables& tables, const UpdateArgs& args,
                    const Traces& traces, c10::cuda::CUDAStream stream) {
  keep_with_graph(std::make_shared<Traces>(traces), stream);
  const auto tensors = static_cast<int64_t>(work.tensors.size());
  const auto chunks = static_cast<int64_t>(work.chunks.size());
  const TraceArgs to{tables.first_of_tensor.address<const int64_t>(stream),
                     static_cast<ChunkTrace*>(traces.chunks.data_ptr()),
                     traces.norms.data_ptr<double>(), traces.lost.data_ptr<int64_t>()};
  for (int k = 0; k < kKinds && chunks > 0; ++k) {
    const auto kind = static_cast<Kind>(k);
    if (std::any_of(work.tensors.begin(), work.tensors.end(),
                    [kind](const TensorWork& tensor) { return tensor.kind == kind; })) {
      launch_traced(kind, args, to, chunks, stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
  launch_checked(SumTracesKernel{{}, args, to}, tensors);
}

// Returns the tables with all that update() needs, so that step counts advance after all
// allocations.
CudaTables& update_tables(const WorkList& work, c10::cuda::CUDAStream stream) {
  CudaTables& tables = tables_of(work, stream);
  if (tables.steps.empty()) {
    tables.steps.reserve(work.tensors.size() * sizeof(TensorStep));
  }
  if (tables.chunks.empty() && !work.chunks.empty()) {
    const UpdateChunks cut(work);
    fill_chunks(work, cut, tables, stream);
    fill_average_chunks(cut, tables, stream);
  }
  if (work.options.track != 0 && tables.first_of_tensor.empty()) {
    tables.first_of_tensor.upload(first_chunks(work.chunks, work.tensors.size(), 1), stream);
  }
  return tables;
}

// A replay uses the states by their addresses, although the optimizer may be gone. States on the
// host would then be no memory at all, an access to which ends the process.
void keep_host_states(const WorkList& work, c10::cuda::CUDAStream stream) {
  const auto blocks = std::make_shared<std::vector<std::shared_ptr<void>>>();
  if (!keep_with_graph(blocks, stream)) {
    return;
  }
  for (const TensorWork& tensor : work.tensors) {
    for (int array = 0; array < kPersistentArrays; ++array) {
      std::shared_ptr<void> block = host_block_at(tensor.memory[array]);
      if (block != nullptr && std::ranges::find(*blocks, block) == blocks->end()) {
        blocks->push_back(std::move(block));
      }
    }
  }
}

void prepare(const WorkList& work, at::Device device) {
  if (!work.tensors.empty()) {
    const c10::cuda::CUDAGuard guard(device);
    update_tables(work, at::cuda::getCurrentCUDAStream());
  }
}

void update(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control,
            const Traces& traces) {
  if (work.tensors.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(control.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  CudaTables& tables = update_tables(work, stream);
  keep_host_states(work, stream);
  UpdateArgs args{};
  args.tensors = tables.tensors.address<const TensorWork>(stream);
  args.steps = tables.steps.address<TensorStep>(stream);
  args.control = static_cast<const Control*>(control.const_data_ptr());
  args.options = work.options;
  for (const ParamGroups& range : group_ranges(groups, control.device())) {
    for_each_range<PrepareKernel>(work, [&](auto& kernel) {
      kernel.groups = range;
      kernel.args = args;
      launch_checked(kernel, blocks_for(kernel.gradients.count, kernel.kThreads));
    });
  }
  if (!work.chunks.empty()) {
    args.chunks = tables.chunks.address<const Chunk>(stream);
  }
  if (work.options.track != 0) {
    launch_tracked(work, tables, args, traces, stream);
  } else {
    launch_updates(tables, args, stream);
  }
  if (tables.average_count > 0) {
    args.chunks = tables.average_chunks.address<const Chunk>(stream);
    launch_checked(AverageKernel{{}, args}, tables.average_count);
  }
}

void scaled_copy(const WorkList& work, const at::Tensor& control, bool unscale) {
  if (work.chunks.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(control.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  CudaTables& tables = tables_of(work, stream);
  std::vector<Chunk> chunks;
  add_plain_chunks(work.tensors, [](const TensorWork&) { return kCopyChunk; }, chunks);
  tables.chunks.upload(chunks, stream);
  launch_checked(CopyKernel{{},
                            tables.tensors.address<const TensorWork>(stream),
                            tables.chunks.address<const Chunk>(stream),
                            static_cast<const Control*>(control.const_data_ptr()),
                            unscale},
                 static_cast<int64_t>(chunks.size()));
}

void digest(const WorkList& arrays, const at::Tensor& digests) {
  if (arrays.chunks.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(digests.device());
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  CudaTables& tables = tables_of(arrays, stream);
  tables.chunks.upload(arrays.chunks, stream);
  const auto count = static_cast<int64_t>(arrays.chunks.size());
  launch_checked(DigestKernel{{},
                              tables.tensors.address<const DigestArray>(stream),
                              tables.chunks.address<const Chunk>(stream),
                              count,
                              digests.data_ptr<int64_t>()},
                 blocks_for(count, DigestKernel::kThreads / kWarpThreads));
}

// A negative step is a caller's error that only the host could detect. It counts as 0.
at::Tensor lr_factors(const Schedule& schedule, const at::Tensor& steps) {
  const c10::cuda::CUDAGuard guard(steps.device());
  at::Tensor factors = at::empty(steps.sizes(), steps.options().dtype(at::kDouble));
  if (steps.numel() > 0) {
    launch_checked(LrFactorKernel{{},
                                  schedule,
                                  steps.const_data_ptr<int64_t>(),
                                  factors.data_ptr<double>(),
                                  steps.numel()},
                   blocks_for(steps.numel(), LrFactorKernel::kThreads));
  }
  return factors;
}

}  // namespace

const Passes& passes() {
  static constexpr Passes all{
      sum_of_squares,  clear,      accumulator_total, control_update, loss_scale_update,
      prepare,         update,     scaled_copy,       digest,         lr_factors,
      staging_streams, lock_pages, unlock_pages};
  return all;
}

}  // namespace torchopt_ext::cuda

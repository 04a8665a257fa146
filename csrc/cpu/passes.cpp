// One parallel region per pass over the whole work list, balanced by bytes rather than tensor by
// tensor.
#include "work/passes.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "cpu/float_mode.h"
#include "cpu/kernel_table.h"
#include "kernels/scaled_copy.h"

namespace torchopt_ext::cpu {
namespace {

// Below this many bytes a second thread costs more time than it saves.
constexpr int64_t kBytesPerThread = 32768;

// Calls body(first, last) on ranges of chunks, in parallel and in the mode that FloatMode sets.
template <class Body>
void for_each_share(const WorkList& work, const Body& body) {
  if (work.chunks.empty()) {
    return;
  }
  const int64_t useful = work.cumulative.back() / kBytesPerThread + 1;
  const int64_t shares = std::min<int64_t>(at::get_num_threads(), useful);
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    const FloatMode mode;
    body(first_of_share(work.cumulative, begin, shares),
         first_of_share(work.cumulative, end, shares));
  });
}

// Returns the address of chunk i's gradient, or null without a gradient or beyond the share.
const void* gradient_at(const WorkList& work, size_t i, size_t last) {
  if (i >= last) {
    return nullptr;
  }
  const Chunk& chunk = work.chunks[i];
  const TensorWork& tensor = work.tensors[static_cast<size_t>(chunk.tensor)];
  return tensor.memory[kGrad] == nullptr ? nullptr : element(tensor, kGrad, chunk.begin);
}

// Orders a thread's stores past the caches (the lanes' `stream`) before its later stores. Without
// the fence another thread may see that a pass has ended before it sees the values of the pass.
void store_fence() {
#ifdef __x86_64__
  _mm_sfence();
#endif  // elsewhere only ScalarLane is used, whose stores are ordinary
}

// Above this many bytes of parameters caches hold little of what a pass wrote first. Stores past
// the caches then avoid reading the lines. Steps of parameters with fp32 masters, which alone are
// stored past the caches, move at least ten times the parameters' bytes.
constexpr int64_t kStreamedStep = int64_t{16} << 20;
constexpr int64_t kStreamedCopy = int64_t{64} << 20;

// The scalars of a group at a step count. Successive tensors of equal group and step share them.
struct Scalars {
  int32_t group;
  float step;
  TensorScalars values;
};

std::vector<Hyper> with_learning_rates(const std::vector<GroupHyper>& groups, double lr_factor) {
  std::vector<Hyper> hypers;
  hypers.reserve(groups.size());
  for (const GroupHyper& group : groups) {
    Hyper& hyper = hypers.emplace_back(group.hyper);
    if (group.lr.defined()) {
      hyper.value[kLr] = group.lr.item<double>();
    }
    hyper.value[kLr] *= lr_factor;
  }
  return hypers;
}

// Sums the traces of each tensor's chunks.
void sum_traces(const WorkList& work, const Control& control, const Traces& traces) {
  const auto* chunk_traces = static_cast<const ChunkTrace*>(traces.chunks.const_data_ptr());
  auto* norms = traces.norms.data_ptr<double>();
  auto* lost = traces.lost.data_ptr<int64_t>();
  size_t c = 0;
  for (size_t t = 0; t < work.tensors.size(); ++t) {
    ChunkTrace sum{};
    for (; c < work.chunks.size() && static_cast<size_t>(work.chunks[c].tensor) == t; ++c) {
      add_trace(sum, chunk_traces[c]);
    }
    finish_trace(sum, control, work.tensors[t].memory[kGrad] != nullptr, norms + 2 * t, lost[t]);
  }
}

void sum_of_squares(const WorkList& work, const at::Tensor& accumulator, bool /*normalize*/) {
  auto& total = *static_cast<ExactAccumulator*>(accumulator.data_ptr());
  std::mutex mutex;
  for_each_share(work, [&](size_t first, size_t last) {
    ExactAccumulator acc{};
    int64_t pending = 0;  // elements since acc was normalized, at least a limb's additions
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const TensorWork& tensor = work.tensors[static_cast<size_t>(chunk.tensor)];
      if (tensor.memory[kGrad] != nullptr) {
        pending += chunk.count;
        if (pending > ExactAccumulator::kMaxPendingAdds) {
          accumulator_normalize(acc);
          pending = chunk.count;
        }
        // Prefetch two chunks ahead: one tensor of 1,000 takes 0.4 us, less than a cache miss.
        kernels().add_squares[static_cast<int>(tensor.layout.grad)](
            element(tensor, kGrad, chunk.begin), chunk.count, tensor.row_length,
            gradient_at(work, i + 2, last), acc);
      }
    }
    accumulator_normalize(acc);
    const std::scoped_lock lock(mutex);
    accumulator_merge(total, acc);
  });
  accumulator_normalize(total);
}

void clear(const at::Tensor& accumulator) {
  *static_cast<ExactAccumulator*>(accumulator.data_ptr()) = {};
}

at::Tensor accumulator_total(const at::Tensor& accumulator) {
  const double sum = torchopt_ext::accumulator_total(
      *static_cast<const ExactAccumulator*>(accumulator.const_data_ptr()));
  return at::scalar_tensor(sum, accumulator.options().dtype(at::kDouble));
}

void control_update(const at::Tensor& control, const at::Tensor& accumulator,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  const FloatMode mode;
  torchopt_ext::control_update(
      *static_cast<Control*>(control.data_ptr()),
      torchopt_ext::accumulator_total(
          *static_cast<const ExactAccumulator*>(accumulator.const_data_ptr())),
      grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
      found_inf ? found_inf->const_data_ptr<float>() : nullptr);
}

void loss_scale_update(const at::Tensor& control, const at::Tensor& found_inf,
                       const at::Tensor& scale) {
  const FloatMode mode;
  const bool overflow = read_number(found_inf.const_data_ptr(), dtype_of(found_inf)) != 0.0;
  scaler_update(*static_cast<Control*>(control.data_ptr()), overflow, *scale.data_ptr<float>());
}

void update(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control,
            const Traces& traces) {
  const auto& decision = *static_cast<const Control*>(control.const_data_ptr());
  if (decision.skip != 0.0) {
    return;
  }
  // Kept between steps, so that a step does not allocate memory that grows with the model.
  static thread_local std::vector<Scalars> scalars;
  static thread_local std::vector<uint32_t> scalars_at;  // the index into `scalars` of each tensor
  scalars.clear();
  scalars_at.resize(work.tensors.size());
  {
    const FloatMode mode;
    const double factor = decision.grad_factor;
    const std::vector<Hyper> hypers = with_learning_rates(groups, decision.lr_factor);
    size_t current = 0;
    for (size_t t = 0; t < work.tensors.size(); ++t) {
      const TensorWork& tensor = work.tensors[t];
      if (tensor.memory[kGrad] == nullptr) {
        continue;
      }
      const float step = work.options.counts_steps ? step_of(tensor) += 1.0f : step_of(tensor);
      if (scalars.empty() || scalars[current].group != tensor.group ||
          scalars[current].step != step) {
        const auto group = static_cast<size_t>(tensor.group);
        const Algorithm algorithm = groups[group].algorithm;
        const auto count = static_cast<int64_t>(step);
        current = scalars.size();
        scalars.push_back({tensor.group,
                           step,
                           {scalars_of<float>(algorithm, hypers[group], count, factor),
                            scalars_of<double>(algorithm, hypers[group], count, factor)}});
      }
      scalars_at[t] = static_cast<uint32_t>(current);
    }
  }
  // Worker threads have their own thread_local copies: hand them this thread's.
  const Scalars* const all = scalars.data();
  const uint32_t* const index = scalars_at.data();
  auto* chunk_traces =
      work.options.track != 0 ? static_cast<ChunkTrace*>(traces.chunks.data_ptr()) : nullptr;
  StepOptions options = work.options;
  options.past_caches = work.cumulative.back() > kStreamedStep;
  for_each_share(work, [&, all, index](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const auto t = static_cast<size_t>(chunk.tensor);
      const TensorWork& tensor = work.tensors[t];
      if (tensor.memory[kGrad] != nullptr) {
        const TensorScalars& values = all[index[t]].values;
        if (chunk_traces != nullptr) {
          chunk_traces[i] =
              kernels().traced(kernels(), values, tensor, options, chunk.begin, chunk.end());
        } else {
          kernels().update[static_cast<int>(tensor.kind)](values, tensor, options, chunk.begin,
                                                          chunk.end(), /*change=*/nullptr);
        }
      }
      if (tensor.memory[kEma] != nullptr) {
        kernels().average[is_double(tensor.kind) ? 1 : 0](tensor, options, chunk.begin, chunk.end(),
                                                          decision.ema_weight);
      }
    }
    if (options.past_caches) {
      store_fence();
    }
  });
  if (work.options.track != 0) {
    const FloatMode mode;
    sum_traces(work, decision, traces);
  }
}

void prepare(const WorkList& /*work*/, at::Device /*device*/) {}

void scaled_copy(const WorkList& work, const at::Tensor& control, bool unscale) {
  const auto& decision = *static_cast<const Control*>(control.const_data_ptr());
  if (decision.skip != 0.0) {
    return;
  }
  const double factor = unscale ? decision.grad_factor : 1.0;
  const bool past_caches = work.cumulative.back() > kStreamedCopy;
  for_each_share(work, [&](size_t first, size_t last) {
    const KernelTable& table = kernels();
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const TensorWork& x = work.tensors[static_cast<size_t>(chunk.tensor)];
      const auto [to_dtype, from_dtype] = std::pair(x.layout.param, x.layout.grad);
      if (is_noop_copy(x.memory[kParam], x.memory[kGrad], to_dtype, factor)) {
        continue;
      }
      void* to = element(x, kParam, chunk.begin);
      const void* from = element(x, kGrad, chunk.begin);
      table.scaled_copy[static_cast<int>(to_dtype)][static_cast<int>(from_dtype)](
          to, from, factor, chunk.count, past_caches && to != from);
    }
    if (past_caches) {
      store_fence();
    }
  });
}

void digest(const WorkList& arrays, const at::Tensor& digests) {
  auto* sums = digests.data_ptr<int64_t>();
  for_each_share(arrays, [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = arrays.chunks[i];
      const DigestArray& array = arrays.tensors[static_cast<size_t>(chunk.tensor)];
      const uint64_t digest = kernels().digest(array, chunk.begin, chunk.end());
      std::atomic_ref(sums[chunk.tensor]).fetch_add(static_cast<int64_t>(digest));
    }
  });
}

at::Tensor lr_factors(const Schedule& schedule, const at::Tensor& steps) {
  at::Tensor factors = at::empty(steps.sizes(), steps.options().dtype(at::kDouble));
  const auto* from = steps.const_data_ptr<int64_t>();
  auto* to = factors.data_ptr<double>();
  const FloatMode mode;
  for (int64_t i = 0; i < steps.numel(); ++i) {
    TORCH_CHECK_VALUE(from[i] >= 0, "step ", i, " is ", from[i], ", expected 0 or more");
    to[i] = lr_factor(schedule, from[i]);
  }
  return factors;
}

// Copies at once.
struct NoStreams final : StagingStreams {
  void copy(StagingStream, void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void record(size_t, StagingStream) override {}
  void wait(StagingStream, size_t) override {}
};

std::unique_ptr<StagingStreams> staging_streams(at::Device) {
  return std::make_unique<NoStreams>();
}

void leave_pages(void*, size_t, at::Device) {}
bool may_free_pages(void*, size_t, at::Device) { return true; }

}  // namespace

const Passes& passes() {
  static constexpr Passes all{
      sum_of_squares,  clear,       accumulator_total, control_update, loss_scale_update,
      prepare,         update,      scaled_copy,       digest,         lr_factors,
      staging_streams, leave_pages, may_free_pages};
  return all;
}

}  // namespace torchopt_ext::cpu

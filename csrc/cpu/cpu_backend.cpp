// The CPU back end of a step: one parallel region per pass over the whole work list, balanced by
// bytes rather than tensor by tensor.
#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include <mutex>

#include "cpu/adam_slice.h"
#include "cpu/sum_of_squares_chunk.h"
#include "kernels/adam.h"
#include "kernels/float_mode.h"
#include "plan/backend.h"

namespace torchopt_ext {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32768;

// Calls body(first, last) on ranges of chunks, in parallel and in the pinned floating-point mode.
template <class Body>
void for_each_share(const WorkList& work, const Body& body) {
  if (work.chunks.empty()) {
    return;
  }
  const int64_t useful = work.cumulative.back() / kBytesPerThread + 1;
  const int64_t shares = std::min<int64_t>(at::get_num_threads(), useful);
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    const FloatMode mode;
    for (int64_t share = begin; share < end; ++share) {
      const auto [first, last] = share_of(work.cumulative, share, shares);
      body(first, last);
    }
  });
}

void sum_of_squares(const WorkList& work, const at::Tensor& accumulator) {
  auto& total = *static_cast<ExactAccumulator*>(accumulator.data_ptr());
  std::mutex mutex;
  for_each_share(work, [&](size_t first, size_t last) {
    ExactAccumulator acc{};
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const TensorWork& tensor = work.tensors[static_cast<size_t>(chunk.tensor)];
      if (tensor.grad != nullptr) {
        add_chunk(kernels(), tensor, chunk, acc);
        accumulator_normalize(acc);  // a chunk adds far fewer than kMaxPendingAdds
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    accumulator_merge(total, acc);
  });
  accumulator_normalize(total);
}

at::Tensor total(const at::Tensor& accumulator) {
  const double sum =
      accumulator_total(*static_cast<const ExactAccumulator*>(accumulator.const_data_ptr()));
  return at::scalar_tensor(sum, accumulator.options().dtype(at::kDouble));
}

void control_update_cpu(const at::Tensor& control, const at::Tensor& accumulator,
                        const std::optional<at::Tensor>& grad_scale,
                        const std::optional<at::Tensor>& found_inf) {
  const FloatMode mode;
  control_update(*static_cast<Control*>(control.data_ptr()),
                 *static_cast<const ExactAccumulator*>(accumulator.const_data_ptr()),
                 grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
                 found_inf ? found_inf->const_data_ptr<float>() : nullptr);
}

// The scalars of a param group at a step count; tensors that share both share these.
struct Scalars {
  int32_t group;
  float step;
  AdamScalars<float> as_float;
  AdamScalars<double> as_double;
};

void adam(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control) {
  const auto& decision = *static_cast<const Control*>(control.const_data_ptr());
  if (decision.skip != 0.0) {
    return;
  }
  std::vector<AdamHyper> hypers;
  hypers.reserve(groups.size());
  for (const GroupHyper& group : groups) {
    hypers.push_back(group.adam);
    if (group.lr.defined()) {
      hypers.back().lr = group.lr.item<double>();
    }
  }
  // Which scalars each tensor uses. Kept between steps, so that a step does not allocate them.
  static thread_local std::vector<Scalars> scalars;
  static thread_local std::vector<size_t> scalars_of;
  scalars.clear();
  scalars_of.assign(work.tensors.size(), 0);
  {
    const FloatMode mode;
    size_t current = 0;
    for (size_t t = 0; t < work.tensors.size(); ++t) {
      const TensorWork& tensor = work.tensors[t];
      if (tensor.grad == nullptr) {
        continue;
      }
      const float step = *tensor.step + 1.0f;
      *tensor.step = step;
      if (scalars.empty() || scalars[current].group != tensor.group ||
          scalars[current].step != step) {
        const AdamHyper& hyper = hypers[static_cast<size_t>(tensor.group)];
        const auto count = static_cast<int64_t>(step);
        current = scalars.size();
        scalars.push_back({tensor.group, step,
                           adam_scalars<float>(hyper, count, decision.grad_factor),
                           adam_scalars<double>(hyper, count, decision.grad_factor)});
      }
      scalars_of[t] = current;
    }
  }
  // Worker threads have their own thread_local copies: hand them this thread's.
  const Scalars* const all = scalars.data();
  const size_t* const index = scalars_of.data();
  for_each_share(work, [&, all, index](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const auto t = static_cast<size_t>(chunk.tensor);
      const TensorWork& tensor = work.tensors[t];
      if (tensor.grad == nullptr) {
        continue;
      }
      if (tensor.param_dtype == DType::kFloat64) {
        adam_slice(kernels(), all[index[t]].as_double, tensor, chunk.begin, chunk.end);
      } else {
        adam_slice(kernels(), all[index[t]].as_float, tensor, chunk.begin, chunk.end);
      }
    }
  });
}

const bool registered = [] {
  register_backend(at::kCPU, {sum_of_squares, total, control_update_cpu, adam});
  return true;
}();

}  // namespace
}  // namespace torchopt_ext

#include "plan/staged_update.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "work/host_memory.h"

namespace torchopt_ext {
namespace {

// The arrays that have a value for each element and may lie on the host.
constexpr std::array<Array, kMostStates + 2> kByElement = [] {
  std::array<Array, kMostStates + 2> arrays{kMaster, kEma};
  for (int k = 0; k < kMostStates; ++k) {
    arrays[static_cast<size_t>(k) + 2] = state_array(k);
  }
  return arrays;
}();

int64_t bytes_per_element(const TensorWork& tensor, Array array) {
  return element(tensor, array, 1) - element(tensor, array, 0);
}

std::vector<Array> arrays_on_host(const TensorWork& tensor) {
  std::vector<Array> arrays;
  std::ranges::copy_if(kByElement, std::back_inserter(arrays),
                       [&](Array array) { return is_host_memory(tensor.memory[array]); });
  return arrays;
}

}  // namespace

void StagedUpdate::fill(const WorkList& work) {
  staged_ = std::make_unique<Staged>();
  Staged& staged = *staged_;
  staged.counted.work.tensors = work.tensors;
  staged.counted.work.options = work.options;
  staged.counted.tensors.resize(work.tensors.size());
  std::iota(staged.counted.tensors.begin(), staged.counted.tensors.end(), size_t{0});
  std::vector<Chunk> pieces;  // of one bucket
  int64_t filled = 0;
  for (size_t t = 0; t < work.tensors.size(); ++t) {
    const TensorWork& tensor = work.tensors[t];
    const std::vector<Array> arrays = arrays_on_host(tensor);
    staged.counted.work.ranges.push_back({0, arrays.empty() ? tensor.numel : 0});
    if (arrays.empty()) {
      continue;
    }
    int64_t element_bytes = 0;
    for (const Array array : arrays) {
      element_bytes += bytes_per_element(tensor, array);
    }
    // Each array of a piece may begin within a line of memory, and end within another.
    const auto padding = static_cast<int64_t>(2 * SlotLayout::kLine * arrays.size());
    const int64_t most = ring_->slot_bytes / 4 / element_bytes;
    for (Chunk chunk : make_chunks({tensor}, std::min(kChunkElements, most))) {
      chunk.tensor = static_cast<int32_t>(t);
      const int64_t bytes = chunk.count * element_bytes + padding;
      TORCH_INTERNAL_ASSERT(bytes <= ring_->slot_bytes);
      if (filled + bytes > ring_->slot_bytes) {
        add_bucket(work, std::exchange(pieces, {}));
        filled = 0;
      }
      filled += bytes;
      if (!pieces.empty() && pieces.back().tensor == chunk.tensor) {
        pieces.back().count += chunk.count;
      } else {
        pieces.push_back(chunk);
      }
    }
  }
  if (!pieces.empty()) {
    add_bucket(work, pieces);
  }
  staged.counted.work.split_into_chunks();
}

void StagedUpdate::add_bucket(const WorkList& work, const std::vector<Chunk>& pieces) {
  const size_t slot = staged_->buckets.size() % kSlots;
  auto& [list, tensors] = staged_->buckets.emplace_back();
  list.options = work.options;
  list.options.counts_steps = false;
  for (const Chunk& piece : pieces) {
    tensors.push_back(static_cast<size_t>(piece.tensor));
    list.tensors.push_back(work.tensors[tensors.back()]);
    list.ranges.push_back({piece.begin, piece.end()});
  }
  SlotLayout layout;
  char* const memory = ring_->memory() + slot * ring_->slot_bytes;
  for (const Array array : kByElement) {  // neighbours on the host are so in the slot, too
    for (size_t k = 0; k < pieces.size(); ++k) {
      TensorWork& tensor = list.tensors[k];
      if (!is_host_memory(tensor.memory[array])) {
        continue;
      }
      const auto [begin, end] = list.ranges[k];
      char* const host = element(tensor, array, begin);
      const size_t offset =
          layout.add(host, static_cast<size_t>(element(tensor, array, end) - host));
      // Elements count from the tensor's first, which is not in the slot.
      tensor.memory[array] = memory + offset - begin * bytes_per_element(tensor, array);
    }
  }
  TORCH_INTERNAL_ASSERT(layout.bytes() <= static_cast<size_t>(ring_->slot_bytes));
  staged_->copies.push_back(layout.take());
  list.split_into_chunks();
}

void StagedUpdate::prepare(const WorkList& work, at::Device device) {
  const Passes& passes = passes_on(device);
  if (ring_ == nullptr) {
    passes.prepare(work, device);
    return;
  }
  if (!ring_->slots.defined()) {
    ring_->slots = at::empty({static_cast<int64_t>(kSlots) * ring_->slot_bytes},
                             at::TensorOptions().device(device).dtype(at::kByte));
    ring_->streams = passes.staging_streams(device);
  }
  if (staged_ == nullptr) {
    fill(work);
  }
  passes.prepare(staged_->counted.work, device);
  for (const Pass& bucket : staged_->buckets) {
    passes.prepare(bucket.work, device);
  }
}

void StagedUpdate::update(const WorkList& work, const std::vector<GroupHyper>& groups,
                          const at::Tensor& control, const Traces& traces) {
  const Passes& passes = passes_on(control.device());
  if (ring_ == nullptr) {
    passes.update(work, groups, control, traces);
    return;
  }
  const auto run = [&](Pass& pass) {
    for (size_t k = 0; k < pass.tensors.size(); ++k) {
      pass.work.tensors[k].memory[kGrad] = work.tensors[pass.tensors[k]].memory[kGrad];
    }
    passes.update(pass.work, groups, control, {});
  };
  run(staged_->counted);
  run_staged(*ring_->streams, staged_->copies, ring_->memory(),
             static_cast<size_t>(ring_->slot_bytes), [&](size_t b) { run(staged_->buckets[b]); });
}

}  // namespace torchopt_ext

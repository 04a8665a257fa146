#include "plan/step_plan.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/quantize.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"

namespace torchopt_ext {
namespace {

constexpr const char* kScaleSuffix = "_scale_v2";

// Returns sizes and strides of the scales of a contiguous parameter's moments.
Shape scale_shape(const Shape& param) {
  const size_t dims = param.size() / 2;
  const int64_t row =
      c10::multiply_integers(param.begin() + 1, param.begin() + static_cast<ptrdiff_t>(dims));
  const int64_t groups = groups_in_row(row);
  return {param[0], groups, groups, 1};
}

}  // namespace

Traces new_traces(const WorkList& work, at::Device device) {
  const auto on_device = at::TensorOptions().device(device);
  const auto chunks = static_cast<int64_t>(work.chunks.size());
  const auto n = static_cast<int64_t>(work.tensors.size());
  return {at::zeros({chunks, 3}, on_device.dtype(at::kLong)),
          at::zeros({n, 2}, on_device.dtype(at::kDouble)),
          at::zeros({n}, on_device.dtype(at::kLong))};
}

StepPlan::StepPlan(const std::vector<Entry>& entries, at::Device device, const StepOptions& options,
                   at::TensorList read, std::shared_ptr<StagingRing> ring)
    : records_(entries.size()),
      borrowed_(entries.size()),
      gradients_(entries.size()),
      ring_(std::move(ring)),
      staged_(ring_),
      device_(device) {
  work_.options = options;
  work_.tensors.resize(entries.size());
  names_.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    names_.push_back({entry.name, entry.position, entry.algorithm});
    if (entry.copied) {
      copied_.push_back(i);
    }
    if (!entry.orthogonalization.matrices.empty()) {
      const at::Tensor& averages = entry.tensors[state_array(Muon::kSecondMomentum)];
      orthogonalized_[i] = entry.orthogonalization;
      orthogonalized_[i].averages = averages.defined() ? averages.numel() : 0;
    }
    TensorWork& work = work_.tensors[i];
    work.group = entry.group;
    work.index = entry.place.index;
    const int64_t reals = reals_per_element(entry.tensors[kParam]);
    work.first_element = reals * entry.place.first_element;
    work.run = reals * entry.place.run;
    work.stride = reals * entry.place.stride;
    work.rows = entry.place.rows;
    work.gap = reals * entry.place.gap;
    check_entry(i, entry.tensors);
    for (size_t array = 0; array < kPersistentArrays; ++array) {
      const at::Tensor& tensor = entry.tensors[array];
      borrowed_[i][array] = tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr;
    }
  }
  check_overlap(read);
  split_into_chunks();
}

bool StepPlan::is_copied(size_t i) const {
  return std::binary_search(copied_.begin(), copied_.end(), i);
}

Label StepPlan::what(size_t array, size_t i) const {
  const auto& [name, position, algorithm] = names_[i];
  const auto states = declaration_of(algorithm).states;
  switch (array) {
    case kParam:
      return {is_copied(i) ? "low-precision copy" : "parameter", position, &name};
    case kMaster:
      return {is_copied(i) ? "parameter" : "master weight", position, &name};
    case kEma:
      return {"ema_weight", position, &name};
    case kStep:
      return {"state step", position, &name};
    case kGrad:
      return {"gradient", position, &name};
    default:
      return array < kMaster ? Label{states[array - kState].name, position, &name}
                             : Label{states[array - kScale].name, position, &name, kScaleSuffix};
  }
}

void StepPlan::check_overlap(at::TensorList gradients) const {
  std::vector<UsedTensor> tensors;
  tensors.reserve(size() * kPersistentArrays + gradients.size());
  for (size_t array = 0; array < kPersistentArrays; ++array) {
    for (size_t i = 0; i < size(); ++i) {
      tensors.push_back({borrowed_[i][array], true});
    }
  }
  for (const at::Tensor& gradient : gradients) {
    tensors.push_back({gradient.unsafeGetTensorImpl(), work_.options.write_back_gradients});
  }
  auto overlap = find_overlap(tensors);
  if (!overlap) {
    return;
  }
  tensors.resize(size());  // the parameters: the message names parameters if they overlap
  overlap = find_overlap(tensors).value_or(*overlap);
  const auto name = [&](size_t k) { return what(k / size(), k % size()); };
  TORCH_CHECK(false, name(overlap->first), " shares memory with ", name(overlap->second));
}

void StepPlan::split_into_chunks() {
  shares_version_.clear();
  checked_gradients_.clear();
  work_.split_into_chunks();
  orthogonal_.reset();
  staged_.reset();
  if (work_.options.track != 0) {
    traces_ = new_traces(work_, device_);
  }
}

bool StepPlan::attach(size_t i, const TensorImpls& tensors) {
  Record& record = records_[i];
  if (borrowed_[i] != tensors) {
    record.impl_changed = true;
    borrowed_[i] = tensors;
  }
  const TensorWork& work = work_.tensors[i];
  const auto fits = [&](size_t array) {
    const c10::TensorImpl* tensor = tensors[array];
    if (tensor == nullptr) {
      return true;
    }
    const NonDense* non_dense = array == kParam && record.non_dense ? &non_dense_.at(i) : nullptr;
    const void* memory = non_dense != nullptr ? non_dense->memory : work.memory[array];
    const bool is_scale = array >= kScale && array < kStep;
    return tensor->dtype() == record.type[array] &&
           (work.numel == 0 || address(*tensor) == memory) &&
           (record.by_row == array && array != kParam
                ? tensor->numel() == record.rows && tensor->is_contiguous()
            : is_scale
                ? has_shape(*tensor, scale_shape(record.shape))
                : has_shape(*tensor, non_dense != nullptr ? non_dense->shape : record.shape));
  };
  bool all = !record.impl_changed && address(*tensors[kStep]) == work.memory[kStep] &&
             tensors[kStep]->dtype() == record.type[kStep];
  for (size_t array = 0; array < kStep && all; ++array) {
    all = fits(array);
  }
  return all;
}

void StepPlan::renew(const std::vector<size_t>& changed) {
  for (const size_t i : changed) {
    Tensors tensors;
    for (size_t array = 0; array < kPersistentArrays; ++array) {
      tensors[array] = to_tensor(borrowed_[i][array]);
    }
    for (const Array array : {kParam, kMaster}) {
      const at::Tensor& tensor = tensors[array];
      TORCH_CHECK(
          (tensor.defined() ? tensor.dtype() : caffe2::TypeMeta()) == records_[i].type[array],
          what(array, i), " is of another dtype, which decides what state it needs");
    }
    TORCH_CHECK(!orthogonalized_.contains(i), what(kParam, i),
                " is other memory, in which its matrices may lie otherwise");
    check_entry(i, tensors);
  }
  check_overlap({});
  split_into_chunks();
}

void StepPlan::prepare() {
  if (orthogonalized_.empty()) {
    staged_.prepare(work_, device_);
    return;
  }
  if (orthogonal_ == nullptr) {
    std::vector<const Orthogonalization*> how(size());
    for (const auto& [i, orthogonalization] : orthogonalized_) {
      how[i] = &orthogonalization;
    }
    orthogonal_ = std::make_unique<OrthogonalUpdate>(work_, how, device_, ring_);
  }
  orthogonal_->prepare();
}

void StepPlan::prefetch(size_t i) const {
  const auto ask = [](const void* memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(static_cast<const char*>(memory) + at);
    }
  };
  for (const c10::TensorImpl* tensor : borrowed_[i]) {
    if (tensor != nullptr) {
      ask(tensor, sizeof(c10::TensorImpl));
    }
  }
  ask(records_[i].gradient, sizeof(c10::TensorImpl));
  for (const void* memory : records_[i].prefetch_addresses) {
    ask(memory, 64);
  }
}

}  // namespace torchopt_ext

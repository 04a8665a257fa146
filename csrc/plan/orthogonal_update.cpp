#include "plan/orthogonal_update.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "kernels/control.h"
#include "kernels/quantize.h"
#include "plan/normalize_rows.h"

namespace torchopt_ext {
namespace {

// The most bytes of directions in the buffer, if no tensor has more. On CPUs buckets have several
// matrices for each thread and stay in the caches; on other devices few launches count.
constexpr int64_t kBytesPerThread = int64_t{4} << 20;
constexpr int64_t kBytesOnDevice = int64_t{256} << 20;

// Directions begin at multiples of a cache line in any dtype.
constexpr int64_t kAlignment = 64;
int64_t aligned(int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }

at::ScalarType direction_dtype(const TensorWork& tensor, const Orthogonalization& how,
                               at::Device device) {
  const bool is_double = tensor.layout.param == DType::kFloat64;
  return is_double ? at::kDouble : how.dtype.value_or(device.is_cpu() ? at::kFloat : at::kBFloat16);
}

DType dtype_named(at::ScalarType dtype) {
  return dtype == at::kDouble     ? DType::kFloat64
         : dtype == at::kBFloat16 ? DType::kBFloat16
         : dtype == at::kHalf     ? DType::kFloat16
                                  : DType::kFloat32;
}

// Gives rows of one matrix their place in the parameter, from that of a shard in which they follow
// `begin` elements. They lie within a run, or begin with one.
void leave_out(TensorWork& rows, int64_t begin) {
  rows.first_element = global_element(rows, begin);
  if (rows.run != 0 && begin % rows.run + rows.numel <= rows.run) {
    rows.run = 0;
  }
  TORCH_CHECK(rows.run == 0 || begin % rows.run == 0, "a block of rows begins within a run");
  rows.rows = 0;  // gaps are between matrices
}

}  // namespace

OrthogonalUpdate::OrthogonalUpdate(const WorkList& work,
                                   const std::vector<const Orthogonalization*>& how,
                                   at::Device device, std::shared_ptr<StagingRing> ring)
    : device_(device), options_(work.options), staged_(std::move(ring)) {
  std::vector<size_t> matrices;
  for (size_t t = 0; t < work.tensors.size(); ++t) {
    if (how[t] != nullptr) {
      matrices.push_back(t);
    } else {
      by_element_.tensors.push_back(t);
      by_element_.work.tensors.push_back(work.tensors[t]);
    }
  }
  by_element_.work.options = options_;
  finish(by_element_);
  // Tensors of one shape follow one another, so that their matrices form batches.
  const auto key = [&](size_t t) {
    const Matrix& first = how[t]->matrices.front();
    return std::tuple(direction_dtype(work.tensors[t], *how[t], device), how[t]->newton_schulz,
                      first.rows * first.cols, first.rows, work.tensors[t].numel);
  };
  std::vector<size_t> exchanged;
  std::ranges::copy_if(matrices, std::back_inserter(exchanged),
                       [&](size_t t) { return how[t]->exchange >= 0; });
  std::erase_if(matrices, [&](size_t t) { return how[t]->exchange >= 0; });
  std::ranges::stable_sort(matrices, std::greater<>(), key);
  for (const size_t t : matrices) {
    const at::ScalarType dtype = direction_dtype(work.tensors[t], *how[t], device);
    add(bucket_for(work.tensors[t], *how[t], dtype), work.tensors[t], t, *how[t]);
  }
  first_exchange_ = buckets_.size();
  std::ranges::stable_sort(exchanged, std::less<>(), [&](size_t t) { return how[t]->exchange; });
  for (const size_t t : exchanged) {
    const at::ScalarType dtype = direction_dtype(work.tensors[t], *how[t], device);
    const auto number = static_cast<size_t>(how[t]->exchange);
    while (buckets_.size() <= first_exchange_ + number) {
      const size_t exchange = buckets_.size() - first_exchange_;
      new_bucket(*how[t], dtype).slot = static_cast<int64_t>(exchange) % ExchangeStages::kInFlight;
    }
    Bucket& bucket = buckets_[first_exchange_ + number];
    TORCH_CHECK(bucket.dtype == dtype, "exchange ", number, " has directions of ",
                dtype_name(bucket.dtype), " and ", dtype_name(dtype));
    add(bucket, work.tensors[t], t, *how[t]);
  }
  for (Bucket& bucket : buckets_) {
    finish(bucket.average);
    finish(bucket.apply);
  }
}

OrthogonalUpdate::Bucket& OrthogonalUpdate::new_bucket(const Orthogonalization& how,
                                                       at::ScalarType dtype) {
  Bucket& bucket = buckets_.emplace_back();
  bucket.newton_schulz = how.newton_schulz.get();
  bucket.dtype = dtype;
  bucket.average.work.options = options_;
  bucket.apply.work.options = options_;
  bucket.apply.work.options.counts_steps = false;
  bucket.apply.work.options.write_back_gradients = false;
  return bucket;
}

// Returns the last bucket, or a new one if the tensor does not fit there.
OrthogonalUpdate::Bucket& OrthogonalUpdate::bucket_for(const TensorWork& tensor,
                                                       const Orthogonalization& how,
                                                       at::ScalarType dtype) {
  const int64_t most = device_.is_cpu() ? kBytesPerThread * at::get_num_threads() : kBytesOnDevice;
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const bool fits = !buckets_.empty() && buckets_.back().dtype == dtype &&
                    buckets_.back().newton_schulz == how.newton_schulz.get() &&
                    (buckets_.back().elements + aligned(tensor.numel)) * bytes <= most;
  return fits ? buckets_.back() : new_bucket(how, dtype);
}

void OrthogonalUpdate::add(Bucket& bucket, const TensorWork& tensor, size_t index,
                           const Orthogonalization& how) {
  const int64_t elements = aligned(tensor.numel);
  const DType direction = dtype_named(bucket.dtype);
  const int64_t first = std::exchange(bucket.elements, bucket.elements + elements);
  bucket.first.push_back(first);
  bucket.averages.push_back(how.averages);

  TensorWork& average = bucket.average.work.tensors.emplace_back(tensor);
  bucket.average.tensors.push_back(index);
  average.layout.param = direction;
  average.layout.master = Master::kNone;
  average.memory[kMaster] = nullptr;
  average.memory[kEma] = nullptr;
  const bool whole_groups = device_.is_cuda() || tensor.row_length % kQuantGroup == 0;
  average.kind = kind_of(kNumberOf<Muon>, average.layout, options_, whole_groups);

  TensorWork apply = tensor;
  apply.layout.grad = direction;
  apply.layout.states = 0;
  apply.layout.state = apply.layout.master == Master::kNone ? apply.layout.param : DType::kFloat32;
  for (int k = 0; k < kMostStates; ++k) {
    apply.memory[state_array(k)] = nullptr;
  }
  apply.kind = kind_of(kNumberOf<Sgd>, apply.layout, bucket.apply.work.options, whole_groups);
  const auto add_applied = [&](int64_t begin, int64_t count, double lr_scale) {
    TensorWork part = apply;
    for (const Array array : {kParam, kMaster, kEma}) {
      if (part.memory[array] != nullptr) {
        part.memory[array] = element(apply, array, begin);
      }
    }
    if (count != tensor.numel) {
      part.numel = count;
      leave_out(part, begin);
    }
    const std::pair group(tensor.group, lr_scale);
    const auto known = std::ranges::find(applied_groups_, group);
    part.group = static_cast<int32_t>(known - applied_groups_.begin());
    if (known == applied_groups_.end()) {
      applied_groups_.push_back(group);
    }
    bucket.apply.work.tensors.push_back(part);
    bucket.apply.tensors.push_back(index);
    bucket.first_applied.push_back(first + begin);
  };
  const double lr_scale = how.matrices.front().lr_scale;
  if (std::ranges::all_of(how.matrices,
                          [&](const Matrix& matrix) { return matrix.lr_scale == lr_scale; })) {
    add_applied(0, tensor.numel, lr_scale);
  } else {  // blocks of rows
    for (const Matrix& matrix : how.matrices) {
      add_applied(matrix.first, matrix.rows * matrix.cols, matrix.lr_scale);
    }
  }
  std::vector<Matrix>& matrices = bucket.matrices.emplace_back(how.matrices);
  for (Matrix& matrix : matrices) {
    matrix.first += first;
  }
}

void OrthogonalUpdate::finish(Pass& pass) const {
  pass.work.split_into_chunks();
  if (options_.track != 0) {
    pass.traces = new_traces(pass.work, device_);
    pass.rows = at::tensor(std::vector<int64_t>(pass.tensors.begin(), pass.tensors.end()),
                           at::TensorOptions().dtype(at::kLong))
                    .to(device_);
  }
}

at::Tensor OrthogonalUpdate::buffer_of(const Bucket& bucket) {
  const auto bytes_of = [](const Bucket& of) {
    return of.elements * static_cast<int64_t>(c10::elementSize(of.dtype));
  };
  at::Tensor& memory = memory_[static_cast<size_t>(bucket.slot)];
  if (!memory.defined()) {
    int64_t most = 0;
    for (const Bucket& other : buckets_) {
      most = other.slot == bucket.slot ? std::max(most, bytes_of(other)) : most;
    }
    memory = at::empty({most}, at::TensorOptions().device(device_).dtype(at::kByte));
  }
  return memory.narrow(0, 0, bytes_of(bucket)).view(bucket.dtype);
}

void OrthogonalUpdate::place(Bucket& bucket, const at::Tensor& buffer) const {
  auto* const memory = static_cast<char*>(buffer.data_ptr());
  const auto size = static_cast<int64_t>(buffer.element_size());
  for (size_t k = 0; k < bucket.first.size(); ++k) {
    void*& direction = bucket.average.work.tensors[k].memory[kParam];
    void* const placed = memory + size * bucket.first[k];
    if (direction != placed) {
      direction = placed;
      bucket.average.work.device_tables.reset();  // they have the address
    }
  }
  for (size_t k = 0; k < bucket.first_applied.size(); ++k) {
    TensorWork& apply = bucket.apply.work.tensors[k];
    apply.memory[kGrad] =
        apply.memory[kGrad] == nullptr ? nullptr : memory + size * bucket.first_applied[k];
  }
}

void OrthogonalUpdate::prepare() {
  const Passes& passes = passes_on(device_);
  staged_.prepare(by_element_.work, device_);
  int64_t floats = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    place(bucket, buffer_of(bucket));
    passes.prepare(bucket.average.work, device_);
    passes.prepare(bucket.apply.work, device_);
    if (b < first_exchange_) {
      std::vector<Matrix> all;
      for (const std::vector<Matrix>& matrices : bucket.matrices) {
        all.insert(all.end(), matrices.begin(), matrices.end());
      }
      floats = std::max(floats,
                        orthogonalize_workspace(*bucket.newton_schulz, all, device_, bucket.dtype));
    }
  }
  workspace_ = at::empty({floats}, at::TensorOptions().device(device_).dtype(at::kFloat));
}

int64_t OrthogonalUpdate::orthogonalize(const Bucket& bucket, const at::Tensor& buffer) const {
  std::vector<Matrix> matrices;
  for (size_t k = 0; k < bucket.matrices.size(); ++k) {
    if (bucket.average.work.tensors[k].memory[kGrad] != nullptr) {
      matrices.insert(matrices.end(), bucket.matrices[k].begin(), bucket.matrices[k].end());
    }
  }
  orthogonalize_matrices(*bucket.newton_schulz, matrices, buffer, workspace_);
  return static_cast<int64_t>(matrices.size());
}

void OrthogonalUpdate::normalize(const Bucket& bucket, const std::vector<GroupHyper>& groups,
                                 const at::Tensor& buffer, const at::Tensor& skip) const {
  for (size_t k = 0; k < bucket.matrices.size(); ++k) {
    const TensorWork& tensor = bucket.average.work.tensors[k];
    auto* const averages = static_cast<float*>(tensor.memory[state_array(Muon::kSecondMomentum)]);
    if (averages == nullptr || tensor.memory[kGrad] == nullptr) {
      continue;
    }
    const double beta2 = groups[static_cast<size_t>(tensor.group)].hyper[Muon::kBeta2];
    normalize_rows(buffer, bucket.matrices[k], {averages, beta2}, skip);
  }
}

void OrthogonalUpdate::update(const WorkList& work, const std::vector<GroupHyper>& groups,
                              const at::Tensor& control, const Traces& traces,
                              const Exchange& exchange) {
  constexpr int64_t kOrthogonalized = offsetof(Control, orthogonalized) / sizeof(double);
  constexpr int64_t kSkip = offsetof(Control, skip) / sizeof(double);
  if (device_.is_cpu() && static_cast<const Control*>(control.const_data_ptr())->skip != 0.0) {
    release();
    return;
  }
  const Passes& passes = passes_on(device_);
  const auto take_gradients = [&](Pass& pass) {
    for (size_t k = 0; k < pass.tensors.size(); ++k) {
      pass.work.tensors[k].memory[kGrad] = work.tensors[pass.tensors[k]].memory[kGrad];
    }
  };
  take_gradients(by_element_);
  staged_.update(by_element_.work, groups, control, by_element_.traces);
  std::vector<GroupHyper> applied;
  for (const auto& [group, lr_scale] : applied_groups_) {
    applied.push_back(groups[static_cast<size_t>(group)]);
    applied.back().hyper.value[Muon::kLrScale] = lr_scale;
  }
  const auto average = [&](Bucket& bucket) {
    at::Tensor buffer = buffer_of(bucket);
    take_gradients(bucket.average);
    take_gradients(bucket.apply);
    place(bucket, buffer);
    passes.update(bucket.average.work, groups, control, bucket.average.traces);
    return buffer;
  };
  const auto apply = [&](const Bucket& bucket) {
    passes.update(bucket.apply.work, applied, control, bucket.apply.traces);
  };
  int64_t count = 0;
  for (size_t b = 0; b < first_exchange_; ++b) {
    Bucket& bucket = buckets_[b];
    const at::Tensor buffer = average(bucket);
    count += orthogonalize(bucket, buffer);
    normalize(bucket, groups, buffer, control.select(0, kSkip));
    apply(bucket);
  }
  if (exchanges()) {
    TORCH_CHECK(exchange, "the plan has parts of matrices and no exchange with other ranks");
    const auto bucket_of = [&](int64_t k) -> Bucket& {
      return buckets_.at(first_exchange_ + static_cast<size_t>(k));
    };
    count += exchange({.average =
                           [&](int64_t k) {
                             Bucket& bucket = bucket_of(k);
                             return directions(bucket, groups, average(bucket));
                           },
                       .apply =
                           [&](int64_t k) {
                             keep_averages(bucket_of(k), control.select(0, kSkip));
                             apply(bucket_of(k));
                           }});
  }
  release();
  control.select(0, kOrthogonalized).add_(count).sub_(control.select(0, kSkip), count);
  if (options_.track != 0) {
    collect_traces(traces);
  }
}

at::Tensor OrthogonalUpdate::averages_of(const Bucket& bucket, size_t k) const {
  void* const memory = bucket.average.work.tensors[k].memory[state_array(Muon::kSecondMomentum)];
  return memory == nullptr ? at::Tensor()
                           : at::from_blob(memory, {bucket.averages[k]},
                                           at::TensorOptions().device(device_).dtype(at::kFloat));
}

std::vector<std::optional<Direction>> OrthogonalUpdate::directions(
    Bucket& bucket, const std::vector<GroupHyper>& groups, const at::Tensor& buffer) const {
  std::vector<std::optional<Direction>> all(bucket.first.size());
  bucket.new_averages.assign(bucket.first.size(), {});
  for (size_t k = 0; k < all.size(); ++k) {
    const TensorWork& tensor = bucket.average.work.tensors[k];
    if (tensor.memory[kGrad] == nullptr) {
      continue;
    }
    std::optional<at::Tensor> averages;
    if (const at::Tensor held = averages_of(bucket, k); held.defined()) {
      averages = bucket.new_averages[k] = held.clone();
    }
    all[k] = {buffer.narrow(0, bucket.first[k], tensor.numel), averages,
              groups[static_cast<size_t>(tensor.group)].hyper[Muon::kBeta2]};
  }
  return all;
}

void OrthogonalUpdate::keep_averages(Bucket& bucket, const at::Tensor& skip) const {
  for (size_t k = 0; k < bucket.new_averages.size(); ++k) {
    if (const at::Tensor& averages = bucket.new_averages[k]; averages.defined()) {
      const at::Tensor held = averages_of(bucket, k);
      held.copy_(at::where(skip == 0.0, averages, held));
    }
  }
  bucket.new_averages.clear();
}

void OrthogonalUpdate::release() {
  workspace_.reset();
  if (device_.is_cpu()) {
    memory_ = {};
  }
}

void OrthogonalUpdate::collect_traces(const Traces& traces) const {
  traces.norms.zero_();
  traces.lost.zero_();
  traces.norms.index_copy_(0, by_element_.rows, by_element_.traces.norms);
  traces.lost.index_copy_(0, by_element_.rows, by_element_.traces.lost);
  // The gradient's norm is from the pass that reads it, what happened to the weights from the
  // other. A tensor may be applied in several parts.
  const at::Tensor update_squares = at::zeros(traces.lost.sizes(), traces.norms.options());
  for (const Bucket& bucket : buckets_) {
    traces.norms.select(1, 0).index_copy_(0, bucket.average.rows,
                                          bucket.average.traces.norms.select(1, 0));
    update_squares.index_add_(0, bucket.apply.rows,
                              bucket.apply.traces.norms.select(1, 1).square());
    traces.lost.index_add_(0, bucket.apply.rows, bucket.apply.traces.lost);
  }
  traces.norms.select(1, 1).add_(update_squares.sqrt_());
}

}  // namespace torchopt_ext

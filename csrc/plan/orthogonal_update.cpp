#include "plan/orthogonal_update.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
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

bool is_multiplied_here(const NewtonSchulz& newton_schulz, at::Device device,
                        at::ScalarType dtype) {
  return !newton_schulz.instead && device.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble);
}

std::vector<cpu::Matrix> in_memory(const std::vector<Matrix>& matrices, float* memory) {
  std::vector<cpu::Matrix> all;
  all.reserve(matrices.size());
  for (const auto& [first, rows, cols, stride, lr_scale] : matrices) {
    all.push_back({memory + first, rows, cols, stride});
  }
  return all;
}

// By this library's products, in float32.
void orthogonalize_on_cpu(const NewtonSchulz& newton_schulz, const std::vector<Matrix>& matrices,
                          const at::Tensor& buffer, const at::Tensor& workspace) {
  const at::Tensor directions = buffer.to(at::kFloat);
  cpu::orthogonalize(newton_schulz, in_memory(matrices, directions.data_ptr<float>()),
                     workspace.data_ptr<float>());
  if (!directions.is_same(buffer)) {
    buffer.copy_(directions);
  }
}

// By torch's products or the group's function, matrices of one shape at equal distances in one
// batch.
void orthogonalize_batches(const NewtonSchulz& newton_schulz, const std::vector<Matrix>& matrices,
                           const at::Tensor& buffer) {
  for (size_t i = 0; i < matrices.size();) {
    const auto& [first, rows, cols, stride, lr_scale] = matrices[i];
    int64_t distance = rows * stride;
    int64_t size = 1;
    for (; i + size < matrices.size(); ++size) {
      const Matrix& next = matrices[i + size];
      distance = size == 1 ? next.first - first : distance;
      if (next.rows != rows || next.cols != cols || next.stride != stride ||
          next.first != first + size * distance) {
        break;
      }
    }
    const at::Tensor batch = buffer.as_strided({size, rows, cols}, {distance, stride, 1}, first);
    batch.copy_(orthogonalized(newton_schulz, batch));
    i += static_cast<size_t>(size);
  }
}

}  // namespace

OrthogonalUpdate::OrthogonalUpdate(const WorkList& work,
                                   const std::vector<const Orthogonalization*>& how,
                                   at::Device device)
    : device_(device), options_(work.options) {
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
  std::ranges::stable_sort(matrices, std::greater<>(), key);
  for (const size_t t : matrices) {
    add(work.tensors[t], t, *how[t], direction_dtype(work.tensors[t], *how[t], device));
  }
  for (Bucket& bucket : buckets_) {
    finish(bucket.average);
    finish(bucket.apply);
  }
}

void OrthogonalUpdate::add(const TensorWork& tensor, size_t index, const Orthogonalization& how,
                           at::ScalarType dtype) {
  const int64_t most = device_.is_cpu() ? kBytesPerThread * at::get_num_threads() : kBytesOnDevice;
  const int64_t elements = (tensor.numel + kAlignment - 1) / kAlignment * kAlignment;
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  if (buckets_.empty() || buckets_.back().dtype != dtype ||
      buckets_.back().newton_schulz != how.newton_schulz.get() ||
      (buckets_.back().elements + elements) * bytes > most) {
    buckets_.emplace_back();
    buckets_.back().newton_schulz = how.newton_schulz.get();
    buckets_.back().dtype = dtype;
    buckets_.back().average.work.options = options_;
    buckets_.back().apply.work.options = options_;
    buckets_.back().apply.work.options.counts_steps = false;
    buckets_.back().apply.work.options.write_back_gradients = false;
  }
  Bucket& bucket = buckets_.back();
  const DType direction = dtype_named(dtype);
  const int64_t first = std::exchange(bucket.elements, bucket.elements + elements);
  bucket.first.push_back(first);

  TensorWork& average = bucket.average.work.tensors.emplace_back(tensor);
  bucket.average.tensors.push_back(index);
  average.layout.param = direction;
  average.layout.master = Master::kNone;
  average.memory[kMaster] = nullptr;
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
    for (const Array array : {kParam, kMaster}) {
      if (part.memory[array] != nullptr) {
        part.memory[array] = element(apply, array, begin);
      }
    }
    part.numel = count;
    part.first_element += begin;
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
  }
}

at::Tensor OrthogonalUpdate::buffer_of(const Bucket& bucket) {
  if (!memory_.defined()) {
    int64_t bytes = 0;
    for (const Bucket& any : buckets_) {
      bytes = std::max(bytes, any.elements * static_cast<int64_t>(c10::elementSize(any.dtype)));
    }
    memory_ = at::empty({bytes}, at::TensorOptions().device(device_).dtype(at::kByte));
  }
  const auto bytes = bucket.elements * static_cast<int64_t>(c10::elementSize(bucket.dtype));
  return memory_.narrow(0, 0, bytes).view(bucket.dtype);
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
  passes.prepare(by_element_.work, device_);
  int64_t floats = 0;
  for (Bucket& bucket : buckets_) {
    place(bucket, buffer_of(bucket));
    passes.prepare(bucket.average.work, device_);
    passes.prepare(bucket.apply.work, device_);
    if (is_multiplied_here(*bucket.newton_schulz, device_, bucket.dtype)) {
      std::vector<cpu::Matrix> all;
      for (const std::vector<Matrix>& matrices : bucket.matrices) {
        std::ranges::copy(in_memory(matrices, nullptr), std::back_inserter(all));
      }
      floats = std::max(floats, cpu::orthogonalize_workspace(*bucket.newton_schulz, all));
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
  const auto count = static_cast<int64_t>(matrices.size());
  std::erase_if(matrices, [](const Matrix& matrix) { return matrix.rows * matrix.cols == 0; });
  if (is_multiplied_here(*bucket.newton_schulz, device_, bucket.dtype)) {
    orthogonalize_on_cpu(*bucket.newton_schulz, matrices, buffer, workspace_);
  } else {
    orthogonalize_batches(*bucket.newton_schulz, matrices, buffer);
  }
  return count;
}

void OrthogonalUpdate::normalize(const Bucket& bucket, const std::vector<GroupHyper>& groups,
                                 const at::Tensor& buffer, const at::Tensor& skip) const {
  for (size_t k = 0; k < bucket.matrices.size(); ++k) {
    const TensorWork& tensor = bucket.average.work.tensors[k];
    auto* averages = static_cast<float*>(tensor.memory[state_array(Muon::kSecondMomentum)]);
    if (averages == nullptr || tensor.memory[kGrad] == nullptr) {
      continue;
    }
    const double beta2 = groups[static_cast<size_t>(tensor.group)].hyper[Muon::kBeta2];
    const std::vector<Matrix>& matrices = bucket.matrices[k];
    for (size_t i = 0; i < matrices.size();) {
      const auto& [first, rows, cols, stride, lr_scale] = matrices[i];
      int64_t batch = 0;
      for (; i < matrices.size() && matrices[i].rows == rows; ++i) {
        ++batch;
      }
      normalize_rows(buffer.narrow(0, first, batch * rows * cols).view({batch, rows, cols}),
                     {averages, beta2}, skip);
      averages += batch * rows;
    }
  }
}

void OrthogonalUpdate::update(const WorkList& work, const std::vector<GroupHyper>& groups,
                              const at::Tensor& control, const Traces& traces) {
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
  passes.update(by_element_.work, groups, control, by_element_.traces);
  std::vector<GroupHyper> applied;
  for (const auto& [group, lr_scale] : applied_groups_) {
    applied.push_back(groups[static_cast<size_t>(group)]);
    applied.back().hyper.value[Muon::kLrScale] = lr_scale;
  }
  int64_t count = 0;
  for (Bucket& bucket : buckets_) {
    const at::Tensor buffer = buffer_of(bucket);
    take_gradients(bucket.average);
    take_gradients(bucket.apply);
    place(bucket, buffer);
    passes.update(bucket.average.work, groups, control, bucket.average.traces);
    count += orthogonalize(bucket, buffer);
    normalize(bucket, groups, buffer, control.select(0, kSkip));
    passes.update(bucket.apply.work, applied, control, bucket.apply.traces);
  }
  release();
  control.select(0, kOrthogonalized).add_(count).sub_(control.select(0, kSkip), count);
  if (options_.track != 0) {
    collect_traces(traces);
  }
}

void OrthogonalUpdate::release() {
  workspace_.reset();
  if (device_.is_cpu()) {
    memory_.reset();
  }
}

void OrthogonalUpdate::collect_traces(const Traces& traces) const {
  const auto rows = [&](const Pass& pass) {
    return at::tensor(std::vector<int64_t>(pass.tensors.begin(), pass.tensors.end()),
                      at::TensorOptions().dtype(at::kLong))
        .to(device_);
  };
  traces.norms.zero_();
  traces.lost.zero_();
  traces.norms.index_copy_(0, rows(by_element_), by_element_.traces.norms);
  traces.lost.index_copy_(0, rows(by_element_), by_element_.traces.lost);
  // The gradient's norm is from the pass that reads it, what happened to the weights from the
  // other. A tensor may be applied in several parts.
  const at::Tensor update_squares = at::zeros(traces.lost.sizes(), traces.norms.options());
  for (const Bucket& bucket : buckets_) {
    traces.norms.select(1, 0).index_copy_(0, rows(bucket.average),
                                          bucket.average.traces.norms.select(1, 0));
    update_squares.index_add_(0, rows(bucket.apply),
                              bucket.apply.traces.norms.select(1, 1).square());
    traces.lost.index_add_(0, rows(bucket.apply), bucket.apply.traces.lost);
  }
  traces.norms.select(1, 1).add_(update_squares.sqrt_());
}

}  // namespace torchopt_ext

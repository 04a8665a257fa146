// A step plan's work in a step: it takes the gradients and runs the two passes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "plan/step_plan.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "plan/weight_copy.h"

namespace torchopt_ext {
namespace {

// Leaves the cache line of an equal value shared: the thread that runs the passes reads values that
// other threads have taken.
template <class T, class Value>
void set_if_other(T& value, Value other) {
  if (value != other) {
    value = other;
  }
}

}  // namespace

void StepPlan::check_step_count(size_t i) const {
  if (device_.is_cpu()) {
    const float step = step_of(work_.tensors[i]);
    TORCH_CHECK(step >= 0.0f && step < 0x1p62f, what(kStep, i), " is ", step,
                ", expected a count of steps");
  }
}

bool StepPlan::take_gradient(size_t i, const at::Tensor& gradient) {
  Record& record = records_[i];
  if (!gradient.defined()) {
    work_.tensors[i].memory[kGrad] = nullptr;
    return true;
  }
  const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
  set_if_other(record.gradient, impl);
  if (record.non_dense || !(impl->key_set() == record.gradient_keys) ||
      gradient.scalar_type() != record.gradient_type || impl->device() != device_ ||
      !has_shape(*impl, record.shape)) {
    return false;
  }
  const void* memory = address(*impl);
  if (memory == nullptr) {
    return false;
  }
  check_step_count(i);
  gradients_[i] = gradient;
  set_if_other(work_.tensors[i].memory[kGrad], const_cast<void*>(memory));
  const void* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  set_if_other(record.prefetch_addresses[kPersistentArrays + 1], storage);
  return true;
}

void StepPlan::set_gradient(size_t i, const at::Tensor& gradient) {
  set_gradients_.push_back(gradient);
  if (take_gradient(i, gradient)) {
    return;
  }
  TensorWork& work = work_.tensors[i];
  Record& record = records_[i];
  const at::ScalarType dtype = gradient.scalar_type();
  at::Tensor param = to_tensor(borrowed_[i][kParam]);
  if (record.non_dense) {
    NonDense& non_dense = non_dense_.at(i);
    non_dense.param = param;
    param = non_dense.copy;
  }
  const at::ScalarType expected = is_copied(i) ? at::kFloat : param.scalar_type();
  const bool fits = dtype == expected || (dtype == at::kFloat && is_16_bit(expected)) ||
                    (is_16_bit(dtype) && expected == at::kFloat);
  if (gradient.layout() != at::kStrided || !fits || gradient.is_meta()) {
    check_supported(gradient, what(kGrad, i), /*complex=*/true);
    TORCH_CHECK(false, what(kGrad, i), " has dtype ", dtype_name(dtype), ", expected ",
                dtype_name(expected));
  }
  check_like(gradient, what(kGrad, i), param, what(is_copied(i) ? kMaster : kParam, i));
  check_step_count(i);
  if (has_shape(*gradient.unsafeGetTensorImpl(), record.shape) && !is_lazy(gradient)) {
    record.gradient_keys = gradient.key_set();
    record.gradient_type = dtype;
    gradients_[i] = gradient;
  } else {
    TORCH_CHECK(!work_.options.write_back_gradients, what(kGrad, i), " has strides ",
                gradient.strides(),
                ", not its parameter's, or is a lazy view, and cannot be written back while it is "
                "stepped");
    gradients_[i] = at::empty_like(param, param.options().dtype(dtype)).copy_(gradient.detach());
    ++gradients_copied_;
    record.gradient_type = at::ScalarType::Undefined;  // take_gradient() rejects the next gradient
  }
  if (work.layout.grad != dtype_of(gradient)) {
    work.layout.grad = dtype_of(gradient);
    set_kind(i);
    work_.device_tables.reset();
    orthogonal_.reset();
    staged_.reset();
  }
  // An empty gradient may have no memory, but its parameter is stepped: its step count advances.
  static constexpr char kEmptyGradient = 0;
  work.memory[kGrad] = const_cast<void*>(
      gradient.numel() > 0 ? address(*gradients_[i].unsafeGetTensorImpl()) : &kEmptyGradient);
  TORCH_CHECK(work.memory[kGrad] != nullptr, what(kGrad, i),
              gradient.unsafeGetTensorImpl()->is_python_dispatch()
                  ? " is a tensor subclass without memory of its own, expected a plain tensor"
                  : " has had its storage freed");
}

void StepPlan::check_gradient_overlap() {
  if (!work_.options.write_back_gradients) {
    return;
  }
  checked_gradients_.resize(size());
  const bool as_before = std::equal(
      checked_gradients_.begin(), checked_gradients_.end(), work_.tensors.begin(),
      [](const void* memory, const TensorWork& work) { return memory == work.memory[kGrad]; });
  if (!as_before) {
    check_overlap(gradients_);
    for (size_t i = 0; i < size(); ++i) {
      checked_gradients_[i] = work_.tensors[i].memory[kGrad];
    }
  }
}

void StepPlan::renew_copies() const {
  for (const size_t i : copied_) {
    if (work_.tensors[i].memory[kGrad] != nullptr &&
        !has_version_of(*borrowed_[i][kParam], *borrowed_[i][kMaster])) {
      renew_copy(to_tensor(borrowed_[i][kParam]), to_tensor(borrowed_[i][kMaster]));
    }
  }
}

void StepPlan::accumulate(const at::Tensor& accumulator, bool normalize) {
  passes_on(device_).sum_of_squares(work_, accumulator, normalize);
}

// Reads the version counters of the parameters of entries [i, end) ahead of the atomic increments,
// which would wait for memory one after the other. Most moments share a counter.
void StepPlan::read_versions(size_t i, size_t end) const {
  for (; i < end; ++i) {
    const c10::VariableVersion& version = borrowed_[i][kParam]->version_counter();
    if (version.enabled()) {
      static_cast<void>(version.current_version());
    }
  }
}

void StepPlan::find_shared_versions() {
  shares_version_.assign(size(), {});
  for (size_t i = 1; i < size(); ++i) {
    for (size_t array = 0; array < kPersistentArrays; ++array) {
      const c10::TensorImpl* tensor = borrowed_[i][array];
      const c10::TensorImpl* before = borrowed_[i - 1][array];
      shares_version_[i][array] =
          tensor != nullptr && before != nullptr &&
          shares_version(tensor->version_counter(), before->version_counter());
    }
  }
}

// Counts the updated tensors as changed, and drops their gradients: the thread that took a gradient
// has its reference count in its cache. On 16 cores update() over 2,000 tensors took 57 us of host
// time, and 100 us when one thread dropped all gradients. The parameter or set_gradients_ also
// refers to each gradient.
void StepPlan::end_update() {
  for_each_entry(size(), [this](size_t begin, size_t end) {
    std::array<bool, kPersistentArrays>
        counted{};  // by array: whether its counter is already bumped
    for (size_t i = begin; i < end; ++i) {
      if ((i - begin) % kEntriesAhead == 0) {
        read_versions(i, std::min(i + kEntriesAhead, end));
      }
      for (size_t array = 0; array < kPersistentArrays; ++array) {
        counted[array] = counted[array] && !shares_version_.empty() && shares_version_[i][array];
        c10::TensorImpl* tensor = borrowed_[i][array];
        if (counted[array] || tensor == nullptr || work_.tensors[i].memory[kGrad] == nullptr) {
          continue;
        }
        counted[array] = true;
        bump_version(tensor);
      }
      if (work_.options.write_back_gradients) {
        bump_version(gradients_[i]);
      }
      gradients_[i].reset();
    }
  });
  for (const size_t i : copied_) {
    if (work_.tensors[i].memory[kGrad] != nullptr) {
      set_version_of(*borrowed_[i][kParam], *borrowed_[i][kMaster]);
    }
  }
}

void StepPlan::update(const std::vector<GroupHyper>& groups, const at::Tensor& control,
                      const Exchange& exchange) {
  for (auto& [i, non_dense] : non_dense_) {
    if (non_dense.param.defined()) {
      non_dense.copy.copy_(non_dense.param.detach());
    }
  }
  if (orthogonalized_.empty()) {
    staged_.update(work_, groups, control, traces_);
  } else {
    if (orthogonal_ == nullptr || !orthogonal_->is_prepared()) {
      prepare();  // an operator's plan
    }
    orthogonal_->update(work_, groups, control, traces_, exchange);
  }
  for (auto& [i, non_dense] : non_dense_) {
    if (non_dense.param.defined()) {
      // end_update() counts the change. copy_() would raise for a tensor made in inference mode.
      const at::AutoDispatchBelowADInplaceOrView uncounted;
      non_dense.param.detach().copy_(non_dense.copy);
    }
  }
  if (has_updated_ && shares_version_.empty()) {
    find_shared_versions();
  }
  has_updated_ = true;
  end_update();
}

void StepPlan::release() {
  for (at::Tensor& gradient : gradients_) {
    gradient.reset();
  }
  const auto dropped = std::exchange(set_gradients_, {});  // a finalizer may call release()
  for (auto& [i, non_dense] : non_dense_) {
    non_dense.param.reset();
  }
}

}  // namespace torchopt_ext

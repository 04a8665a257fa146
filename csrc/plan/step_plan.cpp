#include "plan/step_plan.h"

#include <ATen/ops/empty_like.h>

#include <array>
#include <utility>

#include "plan/tensor_checks.h"

namespace torchopt_ext {
namespace {

std::array<Backend, static_cast<size_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES)>& backends() {
  static std::array<Backend, static_cast<size_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES)> table{};
  return table;
}

void check_state(const at::Tensor& state, const char* role, const StepPlan::Entry& entry,
                 const at::Tensor& dense_param) {
  const std::string what = describe(role, entry.position, entry.name);
  check_supported(state, what);
  check_dense(state, what);
  check_matches(state, what, dense_param, describe("parameter", entry.position, entry.name));
  const bool same_width =
      (state.scalar_type() == at::kDouble) == (entry.param.scalar_type() == at::kDouble);
  TORCH_CHECK(same_width, what, " has dtype ", state.scalar_type(), ", its parameter has ",
              entry.param.scalar_type(), "; float64 goes with float64 only");
  TORCH_CHECK(state.scalar_type() == entry.exp_avg.scalar_type(), what, " has dtype ",
              state.scalar_type(), ", expected ", entry.exp_avg.scalar_type(),
              " as exp_avg of the same parameter");
}

constexpr char kEmptyGradient = 0;

void* data(const at::Tensor& tensor) {
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

}  // namespace

void register_backend(at::DeviceType device, const Backend& backend) {
  backends()[static_cast<size_t>(device)] = backend;
}

const Backend& backend_for(at::Device device) {
  const Backend& backend = backends()[static_cast<size_t>(device.type())];
  TORCH_CHECK(backend.adam != nullptr, "torchopt_ext was built without support for ", device.type(),
              " tensors");
  return backend;
}

StepPlan::StepPlan(std::vector<Entry> entries, at::Device device)
    : entries_(std::move(entries)),
      dense_copies_(entries_.size()),
      gradients_(entries_.size()),
      device_(device) {
  std::vector<NamedTensor> params;  // by themselves first, for the message
  std::vector<NamedTensor> written;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const std::string param_what = what("parameter", i);
    check_supported(entry.param, param_what);
    TORCH_CHECK(entry.param.device() == device_, param_what, " is on ", entry.param.device(),
                ", expected ", device_);
    if (!is_dense(entry.param)) {
      check_no_internal_overlap(entry.param, param_what);
      dense_copies_[i] = at::empty_like(entry.param, at::MemoryFormat::Preserve);
    }
    const at::Tensor& dense = dense_param(i);
    check_state(entry.exp_avg, "exp_avg", entry, dense);
    check_state(entry.exp_avg_sq, "exp_avg_sq", entry, dense);
    if (entry.max_exp_avg_sq.defined()) {
      check_state(entry.max_exp_avg_sq, "max_exp_avg_sq", entry, dense);
    }
    const std::string step_what = what("state step", i);
    TORCH_CHECK(entry.step.defined() && entry.step.scalar_type() == at::kFloat &&
                    entry.step.numel() == 1 && entry.step.device() == device_,
                step_what, " is not one float32 element on ", device_);

    // One with gaps may share its range, though no element, with another column of a matrix.
    if (!dense_copies_[i].defined()) {
      params.push_back({entry.param, param_what, true});
      written.push_back(params.back());
    }
    written.push_back({entry.exp_avg, what("exp_avg", i), true});
    written.push_back({entry.exp_avg_sq, what("exp_avg_sq", i), true});
    written.push_back({entry.max_exp_avg_sq, what("max_exp_avg_sq", i), true});
    written.push_back({entry.step, step_what, true});

    work_.tensors.push_back({.param = data(dense),
                             .grad = nullptr,
                             .exp_avg = data(entry.exp_avg),
                             .exp_avg_sq = data(entry.exp_avg_sq),
                             .max_exp_avg_sq = data(entry.max_exp_avg_sq),
                             .step = static_cast<float*>(data(entry.step)),
                             .numel = dense.numel(),
                             .row_length = row_length(dense),
                             .param_dtype = dtype_of(dense),
                             .state_dtype = dtype_of(entry.exp_avg),
                             .group = entry.group});
  }
  check_no_overlap(params);
  check_no_overlap(written);
  work_.chunks = make_chunks(work_.tensors);
  work_.cumulative = cumulative_bytes(work_.tensors, work_.chunks);
}

std::string StepPlan::what(const char* role, size_t i) const {
  return describe(role, entries_[i].position, entries_[i].name);
}

const at::Tensor& StepPlan::dense_param(size_t i) const {
  return dense_copies_[i].defined() ? dense_copies_[i] : entries_[i].param;
}

bool StepPlan::unchanged() const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const TensorWork& work = work_.tensors[i];
    if (data(dense_param(i)) != work.param || entry.param.numel() != work.numel ||
        dtype_of(entry.param) != work.param_dtype || entry.param.device() != device_ ||
        is_dense(entry.param) == dense_copies_[i].defined() ||
        data(entry.exp_avg) != work.exp_avg || data(entry.exp_avg_sq) != work.exp_avg_sq ||
        data(entry.max_exp_avg_sq) != work.max_exp_avg_sq || data(entry.step) != work.step ||
        dtype_of(entry.exp_avg) != work.state_dtype) {
      return false;
    }
    for (const at::Tensor* moment : {&entry.exp_avg, &entry.exp_avg_sq, &entry.max_exp_avg_sq}) {
      if (moment->defined() &&
          (moment->sizes() != dense_param(i).sizes() || !same_layout(*moment, dense_param(i)))) {
        return false;
      }
    }
  }
  return true;
}

void StepPlan::attach(size_t i, std::array<at::Tensor, 5> param_moments_step) {
  Entry& entry = entries_[i];
  auto& [param, exp_avg, exp_avg_sq, max_exp_avg_sq, step] = param_moments_step;
  entry.param = std::move(param);
  entry.exp_avg = std::move(exp_avg);
  entry.exp_avg_sq = std::move(exp_avg_sq);
  entry.max_exp_avg_sq = std::move(max_exp_avg_sq);
  entry.step = std::move(step);
}

void StepPlan::release() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    attach(i, {});
    gradients_[i].reset();
    work_.tensors[i].grad = nullptr;
  }
}

void StepPlan::set_gradient(size_t i, const at::Tensor& gradient) {
  TensorWork& work = work_.tensors[i];
  if (!gradient.defined()) {
    work.grad = nullptr;
    gradients_[i].reset();
    return;
  }
  const at::Tensor& param = dense_param(i);
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != param.scalar_type() ||
      gradient.is_meta()) {
    check_supported(gradient, what("gradient", i));
    TORCH_CHECK(false, what("gradient", i), " has dtype ", gradient.scalar_type(), ", expected ",
                param.scalar_type());
  }
  TORCH_CHECK(gradient.sizes() == param.sizes(), what("gradient", i), " has shape ",
              gradient.sizes(), ", expected ", param.sizes());
  TORCH_CHECK(gradient.device() == device_, what("gradient", i), " is on ", gradient.device(),
              ", expected ", device_);
  if (device_.is_cpu()) {
    TORCH_CHECK(*work.step >= 0.0f && *work.step < 0x1p62f, what("state step", i), " is ",
                *work.step, ", expected a count of steps");
  }
  if (same_layout(gradient, param) && !is_lazy(gradient)) {
    gradients_[i] = gradient;
  } else {
    gradients_[i] = at::empty_like(param).copy_(gradient.detach());
    ++gradients_copied_;
  }
  // An empty gradient may have no memory, but its parameter takes part: its step counts.
  work.grad = gradient.numel() > 0 ? gradients_[i].const_data_ptr() : &kEmptyGradient;
  TORCH_CHECK(work.grad != nullptr, what("gradient", i), " has had its storage freed");
}

void StepPlan::accumulate(const at::Tensor& accumulator) const {
  backend_for(device_).sum_of_squares(work_, accumulator);
}

void StepPlan::update(const std::vector<GroupHyper>& groups, const at::Tensor& control) {
  std::vector<size_t> copies;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (gradients_[i].defined() && dense_copies_[i].defined()) {
      copies.push_back(i);
      dense_copies_[i].copy_(entries_[i].param.detach());
    }
  }
  backend_for(device_).adam(work_, groups, control);
  for (const size_t i : copies) {
    entries_[i].param.detach().copy_(dense_copies_[i]);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (gradients_[i].defined()) {
      const Entry& entry = entries_[i];
      for (const at::Tensor* tensor :
           {&entry.param, &entry.exp_avg, &entry.exp_avg_sq, &entry.max_exp_avg_sq, &entry.step}) {
        bump_version(*tensor);
      }
    }
  }
}

}  // namespace torchopt_ext

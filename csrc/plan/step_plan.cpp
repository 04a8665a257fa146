#include "plan/step_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <utility>

#include "kernels/quantize.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"

namespace torchopt_ext {
namespace {

constexpr const char* kRoleNames[] = {"parameter",           "exp_avg",       "exp_avg_sq",
                                      "max_exp_avg_sq",      "master weight", "exp_avg_scale_v2",
                                      "exp_avg_sq_scale_v2", "state step"};

void* writable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.mutable_data_ptr() : nullptr;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                          : nullptr;
}

Master master_of(const at::Tensor& master) {
  if (!master.defined()) {
    return Master::kNone;
  }
  const at::ScalarType dtype = master.scalar_type();
  return dtype == at::kShort  ? Master::kRemainder
         : dtype == at::kChar ? Master::kRemainder8
                              : Master::kFloat32;
}

caffe2::TypeMeta type_of(Master master) {
  return c10::scalarTypeToTypeMeta(master == Master::kRemainder    ? at::kShort
                                   : master == Master::kRemainder8 ? at::kChar
                                                                   : at::kFloat);
}

// Sizes and strides of the scales of a contiguous parameter's moments.
Shape scale_shape(const Shape& param) {
  const size_t dims = param.size() / 2;
  const int64_t row =
      c10::multiply_integers(param.begin() + 1, param.begin() + static_cast<ptrdiff_t>(dims));
  const int64_t groups = groups_in_row(row);
  return {param[0], groups, groups, 1};
}

void check_master(const at::Tensor& master, const Label& what, const at::Tensor& param,
                  const Label& param_what) {
  const at::ScalarType dtype = master.scalar_type();
  if (dtype == at::kShort || dtype == at::kChar) {
    TORCH_CHECK(param.scalar_type() == at::kBFloat16, what, " is a remainder (", dtype, "), but ",
                param_what, " has dtype ", param.scalar_type(), ", expected bfloat16");
    check_memory(master, what);
  } else {
    check_supported(master, what);
    TORCH_CHECK(dtype == at::kFloat && is_16_bit(param.scalar_type()), what, " has dtype ", dtype,
                " and ", param_what, " ", param.scalar_type(),
                "; expected float32 for bfloat16 or float16");
  }
  check_dense(master, what);
  check_matches(master, what, param, param_what);
}

}  // namespace

StepPlan::StepPlan(const std::vector<Entry>& entries, at::Device device, const StepOptions& options,
                   at::TensorList read)
    : known_(entries.size()),
      borrowed_(entries.size()),
      gradients_(entries.size()),
      device_(device) {
  work_.options = options;
  work_.tensors.resize(entries.size());
  names_.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    names_.push_back({entry.name, entry.position});
    if (entry.copied) {
      copied_.push_back(i);
    }
    TensorWork& work = work_.tensors[i];
    work.group = entry.group;
    work.index = entry.place.index;
    const int64_t reals = reals_per_element(entry.tensors[kParam]);
    work.first_element = reals * entry.place.first_element;
    work.run = reals * entry.place.run;
    work.stride = reals * entry.place.stride;
    check_entry(i, entry.tensors);
    for (size_t part = 0; part < kKept; ++part) {
      const at::Tensor& tensor = entry.tensors[part];
      borrowed_[i][part] = tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr;
    }
  }
  check_overlap(read);
  split_into_chunks();
}

Label StepPlan::what(const char* role, size_t i) const {
  return {role, names_[i].position, &names_[i].name};
}

bool StepPlan::is_copied(size_t i) const {
  return std::binary_search(copied_.begin(), copied_.end(), i);
}

const char* StepPlan::role(size_t part, size_t i) const {
  if (is_copied(i) && (part == kParam || part == kMaster)) {
    return part == kParam ? "low-precision copy" : kRoleNames[kParam];
  }
  return kRoleNames[part];
}

void StepPlan::check_entry(size_t i, const Tensors& tensors) {
  const at::Tensor& param = tensors[kParam];
  const Label param_what = what(role(kParam, i), i);
  check_supported(param, param_what, /*complex=*/true);
  TORCH_CHECK(param.device() == device_, param_what, " is on ", param.device(), ", expected ",
              device_);
  strided_.erase(i);
  known_[i].strided = false;
  if (!is_dense(param)) {
    check_no_internal_overlap(param, param_what);
    strided_[i] = {at::empty_like(param, at::MemoryFormat::Preserve), at::Tensor(),
                   address(*param.unsafeGetTensorImpl()), shape_of(param)};
    known_[i].strided = true;
  }
  const at::Tensor& dense = known_[i].strided ? strided_[i].copy : param;
  const bool is_quantized =
      tensors[kExpAvg].defined() && tensors[kExpAvg].scalar_type() == at::kChar;
  if (is_quantized) {
    check_quantized(i, tensors, dense);
  } else {
    check_moments(i, tensors, dense);
  }
  if (tensors[kMaster].defined()) {
    check_master(tensors[kMaster], what(role(kMaster, i), i), dense, param_what);
  }
  const at::Tensor& step = tensors[kStep];
  TORCH_CHECK(step.defined() && step.scalar_type() == at::kFloat && step.numel() == 1 &&
                  step.device() == device_,
              what(kRoleNames[kStep], i), " is not one float32 element on ", device_);
  check_memory(step, what(kRoleNames[kStep], i));

  TensorWork& work = work_.tensors[i];
  for (size_t part = 0; part < kKept; ++part) {
    work.memory[part] = writable(part == kParam ? dense : tensors[part]);
  }
  work.numel = reals_per_element(dense) * dense.numel();
  work.row_length = row_length(dense);
  work.layout = {.param = dtype_of(dense),
                 .grad = dtype_of(dense),
                 .state = is_quantized ? DType::kInt8 : dtype_of(tensors[kExpAvg]),
                 .master = master_of(tensors[kMaster]),
                 .amsgrad = tensors[kMaxExpAvgSq].defined()};
  work.kind = kind_of(work.layout, work_.options);
  Known& known = known_[i];
  known.shape = shape_of(dense);
  known.param_type = param.dtype();
  known.state_type = tensors[kExpAvg].dtype();
  known.swapped = false;
  known.gradient_type = -1;
  for (size_t part = 0; part < kKept; ++part) {
    known.behind[part] = storage_of(tensors[part]);
  }
  known.behind[kKept] = param.unsafeGetTensorImpl()->autograd_meta();
}

void StepPlan::check_moments(size_t i, const Tensors& tensors, const at::Tensor& dense) const {
  const at::Tensor& param = tensors[kParam];
  for (const Array part : {kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
    const at::Tensor& moment = tensors[part];
    if (!moment.defined() && part == kMaxExpAvgSq) {
      continue;
    }
    const Label moment_what = what(kRoleNames[part], i);
    check_supported(moment, moment_what, /*complex=*/true);
    check_dense(moment, moment_what);
    check_matches(moment, moment_what, dense, what("parameter", i));
    TORCH_CHECK((dtype_of(moment) == DType::kFloat64) == (dtype_of(param) == DType::kFloat64) &&
                    moment.is_complex() == param.is_complex(),
                moment_what, " has dtype ", moment.scalar_type(), ", its parameter has ",
                param.scalar_type(), "; float64 goes with float64 only, complex with complex");
    TORCH_CHECK(moment.scalar_type() == tensors[kExpAvg].scalar_type(), moment_what, " has dtype ",
                moment.scalar_type(), ", expected ", tensors[kExpAvg].scalar_type(),
                " as exp_avg of the same parameter");
  }
  for (const Array part : {kExpAvgScale, kExpAvgSqScale}) {
    TORCH_CHECK(!tensors[part].defined(), what(kRoleNames[part], i),
                " goes with int8 moments, but exp_avg has dtype ", tensors[kExpAvg].scalar_type());
  }
}

// Groups are of contiguous rows of at least a group's elements.
void StepPlan::check_quantized(size_t i, const Tensors& tensors, const at::Tensor& dense) const {
  const Label param_what = what("parameter", i);
  const at::ScalarType dtype = dense.scalar_type();
  TORCH_CHECK(
      dense.dim() >= 2 && dense.is_contiguous() && (dtype == at::kFloat || is_16_bit(dtype)),
      param_what, " is ", dtype, " with shape ", dense.sizes(), " and strides ", dense.strides(),
      "; 8-bit moments need a contiguous one of float32, bfloat16 or float16 and at least "
      "two dimensions");
  const int64_t row = c10::multiply_integers(dense.sizes().slice(1));
  TORCH_CHECK(row >= kQuantGroup, param_what, " has rows of ", row,
              " elements; 8-bit moments need ", kQuantGroup, " or more");
  TORCH_CHECK(!tensors[kMaxExpAvgSq].defined(), what(kRoleNames[kMaxExpAvgSq], i),
              " does not go with 8-bit moments");
  for (const auto& [part, expected] : {std::pair(kExpAvg, at::kChar), {kExpAvgSq, at::kByte}}) {
    const at::Tensor& moment = tensors[part];
    const Label moment_what = what(kRoleNames[part], i);
    TORCH_CHECK(moment.defined() && moment.scalar_type() == expected, moment_what, " has dtype ",
                moment.scalar_type(), ", expected ", expected, " beside exp_avg of int8");
    check_memory(moment, moment_what);
    check_dense(moment, moment_what);
    check_matches(moment, moment_what, dense, param_what);
  }
  const std::array<int64_t, 2> shape{dense.size(0), groups_in_row(row)};
  for (const Array part : {kExpAvgScale, kExpAvgSqScale}) {
    const at::Tensor& scale = tensors[part];
    const Label scale_what = what(kRoleNames[part], i);
    TORCH_CHECK(scale.defined(), scale_what, " is missing beside moments of int8");
    check_memory(scale, scale_what);
    TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.sizes() == shape &&
                    scale.is_contiguous() && scale.device() == device_,
                scale_what, " is ", scale.scalar_type(), scale.sizes(), " on ", scale.device(),
                ", expected contiguous float32", at::IntArrayRef(shape), " on ", device_);
  }
}

// Parameters by themselves first, for the message.
void StepPlan::check_overlap(at::TensorList read) const {
  std::vector<NamedTensor> tensors;
  tensors.reserve(size() * kKept + read.size());
  size_t params = 0;
  for (size_t part = 0; part < kKept; ++part) {
    for (size_t i = 0; i < size(); ++i) {
      if (borrowed_[i][part] != nullptr) {
        tensors.push_back({borrowed_[i][part], what(role(part, i), i), true});
      }
    }
    params = part == kParam ? tensors.size() : params;
  }
  for (size_t i = 0; i < read.size(); ++i) {
    tensors.push_back({read[i].unsafeGetTensorImpl(), what("gradient", i), false});
  }
  if (may_overlap(tensors)) {
    check_no_overlap({tensors.begin(), tensors.begin() + static_cast<ptrdiff_t>(params)});
    check_no_overlap(tensors);
  }
}

void StepPlan::split_into_chunks() {
  shares_version_.clear();
  work_.split_into_chunks();
  if (work_.options.track != 0) {
    const auto on_device = at::TensorOptions().device(device_);
    const auto n = static_cast<int64_t>(size());
    traces_.chunks =
        at::zeros({static_cast<int64_t>(work_.chunks.size()), 4}, on_device.dtype(at::kLong));
    traces_.norms = at::zeros({n, 2}, on_device.dtype(at::kDouble));
    traces_.counts = at::zeros({n, 2}, on_device.dtype(at::kLong));
  }
}

bool StepPlan::attach(size_t i, const Borrowed& tensors) {
  known_[i].swapped = known_[i].swapped || borrowed_[i] != tensors;
  borrowed_[i] = tensors;
  const TensorWork& work = work_.tensors[i];
  const Known& known = known_[i];
  const auto is_at = [&](const c10::TensorImpl& tensor, const void* memory, caffe2::TypeMeta type,
                         const Shape& shape) {
    return tensor.dtype() == type && (work.numel == 0 || address(tensor) == memory) &&
           has_shape(tensor, shape);
  };
  const auto fits = [&](Array part, caffe2::TypeMeta type) {
    return tensors[part] == nullptr || is_at(*tensors[part], work.memory[part], type, known.shape);
  };
  const auto param_fits = [&] {
    if (!known.strided) {
      return fits(kParam, known.param_type);
    }
    const Strided& strided = strided_.at(i);
    return is_at(*tensors[kParam], strided.memory, known.param_type, strided.shape);
  };
  const auto scales_fit = [&] {
    const Shape shape = scale_shape(known.shape);
    const auto is_known = [&](Array part) {
      return tensors[part] != nullptr &&
             is_at(*tensors[part], work.memory[part], c10::scalarTypeToTypeMeta(at::kFloat), shape);
    };
    return is_known(kExpAvgScale) && is_known(kExpAvgSqScale);
  };
  const bool quantized = work.layout.state == DType::kInt8;
  const caffe2::TypeMeta squares_type =
      quantized ? c10::scalarTypeToTypeMeta(at::kByte) : known.state_type;
  return !known.swapped && address(*tensors[kStep]) == work.memory[kStep] && param_fits() &&
         fits(kExpAvg, known.state_type) && fits(kExpAvgSq, squares_type) &&
         fits(kMaxExpAvgSq, known.state_type) && fits(kMaster, type_of(work.layout.master)) &&
         (!quantized || scales_fit());
}

void StepPlan::renew(const std::vector<size_t>& changed) {
  for (const size_t i : changed) {
    Tensors tensors;
    for (size_t part = 0; part < kKept; ++part) {
      tensors[part] = to_tensor(borrowed_[i][part]);
    }
    TORCH_CHECK(tensors[kParam].dtype() == known_[i].param_type, what("parameter", i),
                " is of another dtype, which decides what state it needs");
    check_entry(i, tensors);
  }
  check_overlap({});
  const at::Tensor counts = traces_.counts;  // digests of tensors without gradient stay
  split_into_chunks();
  if (counts.defined()) {
    traces_.counts.copy_(counts);
  }
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
  ask(known_[i].gradient, sizeof(c10::TensorImpl));
  for (const void* memory : known_[i].behind) {
    ask(memory, 64);
  }
}

}  // namespace torchopt_ext

// A plan's checks of an entry's tensors, and the properties that the plan records of the tensors.
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "kernels/quantize.h"
#include "plan/step_plan.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"

namespace torchopt_ext {
namespace {

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

void check_master(const at::Tensor& master, const Label& what, const at::Tensor& param,
                  const Label& param_what) {
  const at::ScalarType dtype = master.scalar_type();
  if (dtype == at::kShort || dtype == at::kChar) {
    TORCH_CHECK(param.scalar_type() == at::kBFloat16, what, " is a remainder (", dtype_name(dtype),
                "), but ", param_what, " has dtype ", dtype_name(param.scalar_type()),
                ", expected bfloat16");
  } else {
    TORCH_CHECK(dtype == at::kFloat && is_16_bit(param.scalar_type()), what, " has dtype ",
                dtype_name(dtype), " and ", param_what, " ", dtype_name(param.scalar_type()),
                "; expected float32 for bfloat16 or float16");
  }
  check_memory(master, what);
  check_state_matches(master, what, param, param_what);
}

void check_average(const at::Tensor& average, const Label& what, const at::Tensor& param,
                   const Label& param_what) {
  const at::ScalarType dtype = average.scalar_type();
  const bool narrows = param.scalar_type() == at::kFloat || is_16_bit(param.scalar_type());
  const bool fits =
      narrows ? dtype == at::kFloat || dtype == at::kBFloat16 : dtype == param.scalar_type();
  TORCH_CHECK(fits, what, " has dtype ", dtype_name(dtype), ", ", param_what, " ",
              dtype_name(param.scalar_type()),
              "; expected float32 or bfloat16, or the parameter's dtype for wider ones");
  check_memory(average, what);
  check_state_matches(average, what, param, param_what);
}

// Returns the length of a parameter's rows. 8-bit moments need contiguous rows of at least one
// group's elements.
int64_t checked_row(const at::Tensor& dense, const Label& what) {
  const at::ScalarType dtype = dense.scalar_type();
  TORCH_CHECK(
      dense.dim() >= 2 && dense.is_contiguous() && (dtype == at::kFloat || is_16_bit(dtype)), what,
      " is ", dtype_name(dtype), " with shape ", dense.sizes(), " and strides ", dense.strides(),
      "; 8-bit moments need a contiguous one of float32, bfloat16 or float16 and at least "
      "two dimensions");
  const int64_t row = c10::multiply_integers(dense.sizes().slice(1));
  TORCH_CHECK(row >= kQuantGroup, what, " has rows of ", row, " elements; 8-bit moments need ",
              kQuantGroup, " or more");
  return row;
}

}  // namespace

void StepPlan::check_entry(size_t i, const Tensors& tensors) {
  const at::Tensor& param = tensors[kParam];
  const Label param_what = what(kParam, i);
  check_supported(param, param_what, /*complex=*/true);
  TORCH_CHECK(param.device() == device_, param_what, " is on ", param.device(), ", expected ",
              device_);
  non_dense_.erase(i);
  records_[i].non_dense = false;
  if (!param.is_non_overlapping_and_dense()) {
    check_no_internal_overlap(param, param_what);
    non_dense_[i] = {at::empty_like(param, at::MemoryFormat::Preserve), at::Tensor(),
                     address(*param.unsafeGetTensorImpl()), shape_of(param)};
    records_[i].non_dense = true;
  }
  const at::Tensor& dense = records_[i].non_dense ? non_dense_[i].copy : param;
  check_states(i, tensors, dense);
  check_matrices(i, tensors, dense);
  if (tensors[kMaster].defined()) {
    check_master(tensors[kMaster], what(kMaster, i), dense, param_what);
  }
  if (tensors[kEma].defined()) {
    check_average(tensors[kEma], what(kEma, i), dense, param_what);
  }
  const at::Tensor& step = tensors[kStep];
  TORCH_CHECK(step.defined() && step.scalar_type() == at::kFloat && step.numel() == 1 &&
                  step.device() == device_,
              what(kStep, i), " is not one float32 element on ", device_);
  check_memory(step, what(kStep, i));

  TensorWork& work = work_.tensors[i];
  for (size_t array = 0; array < kPersistentArrays; ++array) {
    work.memory[array] = writable(array == kParam ? dense : tensors[array]);
  }
  work.numel = reals_per_element(dense) * dense.numel();
  work.row_length = row_length(dense);
  work.layout = {.param = dtype_of(dense),
                 .grad = dtype_of(dense),
                 .state = DType::kFloat32,
                 .master = master_of(tensors[kMaster]),
                 .states = 0};
  work.ema = tensors[kEma].defined() ? dtype_of(tensors[kEma]) : DType::kFloat32;
  const auto states = declaration_of(names_[i].algorithm).states;
  Record& record = records_[i];
  record.by_row = 0;
  for (size_t k = 0; k < states.size(); ++k) {
    if (states[k].by_row && tensors[kState + k].defined()) {
      record.by_row = kState + k;
      record.rows = tensors[kState + k].numel();
    } else {
      work.layout.states |= tensors[kState + k].defined() ? 1u << k : 0;
    }
  }
  if (tensors[kScale].defined()) {
    work.layout.state = DType::kInt8;
  } else if (tensors[kState].defined()) {
    work.layout.state = dtype_of(tensors[kState]);
  } else if (work.layout.master == Master::kNone) {
    work.layout.state = work.layout.param;
  }
  set_kind(i);
  record.shape = shape_of(dense);
  record.impl_changed = false;
  record.gradient_type = at::ScalarType::Undefined;
  for (size_t array = 0; array < kPersistentArrays; ++array) {
    record.prefetch_addresses[array] = storage_of(tensors[array]);
    record.type[array] = tensors[array].defined() ? tensors[array].dtype() : caffe2::TypeMeta();
  }
  record.prefetch_addresses[kPersistentArrays] = param.unsafeGetTensorImpl()->autograd_meta();
}

void StepPlan::check_states(size_t i, const Tensors& tensors, const at::Tensor& dense) const {
  const Label param_what = what(kParam, i);
  const auto states = declaration_of(names_[i].algorithm).states;
  const bool is_quantized = tensors[kScale].defined();
  std::array<int64_t, 2> scale_shape{};
  if (is_quantized) {
    scale_shape = {dense.size(0), groups_in_row(checked_row(dense, param_what))};
  }
  for (size_t k = 0; k < kMostStates; ++k) {
    const size_t array = kState + k;
    const at::Tensor& state = tensors[array];
    const bool has_scale = k < kMostMoments && tensors[kScale + k].defined();
    if (!state.defined() && !has_scale && (k >= states.size() || states[k].when != nullptr)) {
      continue;
    }
    TORCH_CHECK(k < states.size(), "a parameter has ", k + 1, " states, expected ", states.size());
    const Label state_what = what(array, i);
    if (states[k].by_row) {
      check_memory(state, state_what);
      TORCH_CHECK(
          state.scalar_type() == at::kFloat && state.is_contiguous() && state.device() == device_,
          state_what, " is ", dtype_name(state.scalar_type()), state.sizes(), " on ",
          state.device(), ", expected contiguous float32 on ", device_);
      continue;
    }
    if (!is_quantized) {
      check_supported(state, state_what, /*complex=*/true);
      check_state_matches(state, state_what, dense, param_what);
      TORCH_CHECK((dtype_of(state) == DType::kFloat64) == (dtype_of(dense) == DType::kFloat64) &&
                      state.is_complex() == dense.is_complex(),
                  state_what, " has dtype ", dtype_name(state.scalar_type()),
                  ", its parameter has ", dtype_name(dense.scalar_type()),
                  "; float64 goes with float64 only, complex with complex");
      TORCH_CHECK(state.scalar_type() == tensors[kState].scalar_type(), state_what, " has dtype ",
                  dtype_name(state.scalar_type()), ", expected ",
                  dtype_name(tensors[kState].scalar_type()), " as ", states[0].name,
                  " of the same parameter");
      continue;
    }
    TORCH_CHECK(states[k].is_moment, state_what, " does not go with 8-bit moments");
    const at::ScalarType expected = states[k].as_root ? at::kByte : at::kChar;
    TORCH_CHECK(state.defined() && state.scalar_type() == expected, state_what, " has dtype ",
                dtype_name(state.scalar_type()), ", expected ", dtype_name(expected),
                " beside scales of 8-bit moments");
    check_memory(state, state_what);
    check_state_matches(state, state_what, dense, param_what);
    const at::Tensor& scale = tensors[kScale + k];
    const Label scale_what = what(kScale + k, i);
    TORCH_CHECK(scale.defined(), scale_what, " is missing beside moments of int8");
    check_memory(scale, scale_what);
    TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.sizes() == scale_shape &&
                    scale.is_contiguous() && scale.device() == device_,
                scale_what, " is ", dtype_name(scale.scalar_type()), scale.sizes(), " on ",
                scale.device(), ", expected contiguous float32", at::IntArrayRef(scale_shape),
                " on ", device_);
  }
}

void StepPlan::check_matrices(size_t i, const Tensors& tensors, const at::Tensor& dense) const {
  if (!declaration_of(names_[i].algorithm).writes_direction) {
    return;
  }
  const Label param_what = what(kParam, i);
  TORCH_CHECK(!dense.is_complex(), param_what, " is complex; Muon needs real matrices");
  const auto found = orthogonalized_.find(i);
  TORCH_CHECK(found != orthogonalized_.end(), param_what, " has no matrices");
  const std::vector<Matrix>& matrices = found->second.matrices;
  const at::Tensor& second_momentum = tensors[state_array(Muon::kSecondMomentum)];
  const bool by_row = second_momentum.defined();
  int64_t rows_in_all = 0;
  const bool scales_alike = std::ranges::all_of(
      matrices, [&](const Matrix& matrix) { return matrix.lr_scale == matrices.front().lr_scale; });
  int64_t elements = 0;
  for (const auto& [first, rows, cols, stride, lr_scale] : matrices) {
    // The learning rate of a part is that of consecutive elements (OrthogonalUpdate::add).
    TORCH_CHECK(scales_alike || stride == cols, param_what,
                " has matrices with other learning rates that are no blocks of rows");
    const bool fits = first >= 0 && rows >= 0 && cols >= 0 && stride >= cols &&
                      (rows == 0 || first + (rows - 1) * stride + cols <= dense.numel());
    TORCH_CHECK(fits && lr_scale > 0.0, param_what, " of ", dense.numel(),
                " elements has a matrix ", rows, " x ", cols, " from element ", first,
                " on, at a stride of ", stride, ", with a learning rate times ", lr_scale);
    TORCH_CHECK(!by_row || stride == cols, param_what,
                " has matrices that are no blocks of whole rows, which ",
                what(state_array(Muon::kSecondMomentum), i), " needs");
    elements += rows * cols;
    rows_in_all += rows;
  }
  // Of a row that ranks share, the rank with the first column has the average.
  const bool is_elsewhere = found->second.exchange >= 0 && second_momentum.numel() == 0;
  TORCH_CHECK(!by_row || is_elsewhere || second_momentum.numel() == rows_in_all,
              what(state_array(Muon::kSecondMomentum), i), " has ", second_momentum.numel(),
              " elements, expected ", rows_in_all, ", one for each row of ", param_what);
  TORCH_CHECK(elements == dense.numel(), param_what, " has ", dense.numel(),
              " elements, its matrices ", elements);
}

void StepPlan::set_kind(size_t i) {
  TensorWork& work = work_.tensors[i];
  // Kernels of a GPU take short groups at the ends of rows as they come.
  const bool whole_groups = device_.is_cuda() || work.row_length % kQuantGroup == 0;
  work.kind = kind_of(names_[i].algorithm, work.layout, work_.options, whole_groups);
}

}  // namespace torchopt_ext

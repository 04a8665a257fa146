// scaled_copy_: copies from_[i] to to[i], times the control block's grad_factor if `unscale`, cast
// to the dtype of to[i]. Copies nothing if the control block says skip. to[i] may be from_[i].
#include "kernels/scaled_copy.h"

#include <ATen/ops/empty_like.h>

#include "ops/operator.h"
#include "ops/operators.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

void check_pair(const at::Tensor& to, const at::Tensor& from, size_t i, at::Device device) {
  const Label to_what{"to", i};
  const Label from_what{"from", i};
  check_supported(to, to_what);
  check_supported(from, from_what);
  check_dense(to, to_what);
  TORCH_CHECK(to.device() == device, to_what, " is on ", to.device(), ", expected ", device,
              " as the control block");
  check_like(from, from_what, to, to_what);
  TORCH_CHECK(can_copy(dtype_of(to), dtype_of(from)), from_what, " has dtype ",
              dtype_name(from.scalar_type()), " and ", to_what, " ", dtype_name(to.scalar_type()),
              "; float64 goes with float64 only");
}

// Raises if a written tensor shares memory with another tensor, except to[i] with from[i] itself.
void check_no_overlap(at::TensorList to, at::TensorList from) {
  std::vector<UsedTensor> tensors;
  tensors.reserve(2 * to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    const c10::TensorImpl* target = to[i].unsafeGetTensorImpl();
    const c10::TensorImpl* source = from[i].unsafeGetTensorImpl();
    const bool in_place = address(*source) == address(*target) &&
                          to[i].scalar_type() == from[i].scalar_type() &&
                          same_layout(to[i], from[i]);
    tensors.push_back({target, true});
    tensors.push_back({in_place ? nullptr : source, false});
  }
  const auto name = [](size_t k) { return Label{k % 2 == 0 ? "to" : "from", k / 2}; };
  if (const auto overlap = find_overlap(tensors)) {
    TORCH_CHECK(false, name(overlap->first), " shares memory with ", name(overlap->second));
  }
}

}  // namespace

void scaled_copy_(at::TensorList to, at::TensorList from, const at::Tensor& control, bool unscale) {
  check_control(control);
  TORCH_CHECK(from.size() == to.size(), "got ", from.size(), " tensors in from for ", to.size(),
              " in to");
  for (size_t i = 0; i < to.size(); ++i) {
    check_pair(to[i], from[i], i, control.device());
  }
  check_no_overlap(to, from);
  WorkList work;
  work.tensors.resize(to.size());
  std::vector<at::Tensor> restrided;
  for (size_t i = 0; i < to.size(); ++i) {
    TensorWork& x = work.tensors[i];
    x.numel = to[i].numel();
    x.row_length = 1;
    if (x.numel == 0) {
      continue;
    }
    const bool has_target_layout = same_layout(from[i], to[i]);
    if (!has_target_layout) {
      restrided.push_back(at::empty_like(to[i], from[i].options(), at::MemoryFormat::Preserve));
      restrided.back().copy_(from[i].detach());
    }
    const at::Tensor& source = has_target_layout ? from[i] : restrided.back();
    x.memory[kParam] = to[i].mutable_data_ptr();
    x.memory[kGrad] = const_cast<void*>(source.const_data_ptr());  // read only
    x.layout.param = dtype_of(to[i]);
    x.layout.grad = dtype_of(source);
  }
  work.split_into_chunks();
  passes_on(control.device()).scaled_copy(work, control, unscale);
  for (const at::Tensor& tensor : to) {
    bump_version(tensor);
  }
}

// The name is `from_`: the keyword `from` would break the Python code that torch.compile writes.
const Operator kScaledCopy(
    "scaled_copy_", "(Tensor(a! -> *)[] to, Tensor[] from_, Tensor control, *, bool unscale) -> ()",
    scaled_copy_);

}  // namespace torchopt_ext

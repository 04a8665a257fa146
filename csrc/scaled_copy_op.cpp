// scaled_copy_: checks the two lists, then one pass of the device's back end over all of them.
#include <ATen/ops/empty_like.h>

#include "kernels/scaled_copy.h"
#include "plan/backend.h"
#include "plan/tensor_checks.h"
#include "step_ops.h"

namespace torchopt_ext {
namespace {

void check_pair(const at::Tensor& to, const at::Tensor& from, size_t i, at::Device device) {
  const std::string to_what = describe("to", i);
  const std::string from_what = describe("from", i);
  check_supported(to, to_what);
  check_supported(from, from_what);
  TORCH_CHECK(to.device() == device, to_what, " is on ", to.device(), ", expected ", device,
              " as the control block");
  TORCH_CHECK(from.device() == device, from_what, " is on ", from.device(), ", expected ", device,
              " as the control block");
  check_dense(to, to_what);
  TORCH_CHECK(from.sizes() == to.sizes(), from_what, " has shape ", from.sizes(), ", expected ",
              to.sizes());
  TORCH_CHECK(can_copy(dtype_of(to), dtype_of(from)), from_what, " has dtype ", from.scalar_type(),
              " and ", to_what, " ", to.scalar_type(), "; float64 goes with float64 only");
}

// to[i] may be from[i] itself, and what is only read may be read twice.
void check_apart(at::TensorList to, at::TensorList from) {
  std::vector<MemoryRange> ranges;
  ranges.reserve(2 * to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    const MemoryRange target = memory_of(to[i], 2 * i, /*written=*/true);
    const MemoryRange source = memory_of(from[i], 2 * i + 1, /*written=*/false);
    const bool in_place = source.begin == target.begin &&
                          to[i].scalar_type() == from[i].scalar_type() &&
                          same_layout(to[i], from[i]);
    ranges.push_back(target);
    if (!in_place) {
      ranges.push_back(source);
    }
  }
  const auto name = [](size_t source) {
    return describe(source % 2 == 0 ? "to" : "from", source / 2);
  };
  if (const auto overlap = find_overlap(ranges)) {
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
  check_apart(to, from);
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
    at::Tensor source = from[i];
    if (!same_layout(from[i], to[i])) {
      source = at::empty_like(to[i], from[i].options(), at::MemoryFormat::Preserve);
      source.copy_(from[i].detach());
      restrided.push_back(source);
    }
    x.param = to[i].mutable_data_ptr();
    x.grad = const_cast<void*>(source.const_data_ptr());  // read only
    x.param_dtype = dtype_of(to[i]);
    x.grad_dtype = dtype_of(source);
  }
  work.chunks = make_chunks(work.tensors);
  work.cumulative = cumulative_bytes(work.tensors, work.chunks);
  backend_for(control.device()).scaled_copy(work, control, unscale);
  for (const at::Tensor& tensor : to) {
    bump_version(tensor);
  }
}

}  // namespace torchopt_ext

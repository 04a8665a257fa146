#include "plan/tensor_checks.h"

#include <algorithm>
#include <ostream>

#include "plan/tensor_fields.h"

namespace torchopt_ext {

std::ostream& operator<<(std::ostream& out, const Label& label) {
  out << label.role << " " << label.index;
  if (label.name != nullptr && !label.name->empty()) {
    out << " ('" << *label.name << "')";
  }
  return out;
}

void check_supported(const at::Tensor& tensor, const Label& what, bool complex) {
  TORCH_CHECK(tensor.defined(), what, " is not defined");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(complex || !tensor.is_complex(), what, " has dtype ", dtype,
              "; complex tensors are not supported: pass torch.view_as_real() of it");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
                  dtype == at::kHalf || dtype == at::kComplexFloat || dtype == at::kComplexDouble,
              what, " has dtype ", dtype, ", expected float32, float64, bfloat16 or float16",
              complex ? ", complex64 or complex128" : "");
  check_memory(tensor, what);
}

void check_memory(const at::Tensor& tensor, const Label& what) {
  TORCH_CHECK(tensor.layout() == at::kStrided, what, " has layout ", tensor.layout(),
              ", expected a dense (strided) tensor; sparse gradients are not supported");
  TORCH_CHECK(!tensor.is_meta(), what, " is on the meta device and has no data");
  TORCH_CHECK(!is_lazy(tensor), what,
              " is a lazy view; call resolve_neg() or resolve_conj() first");
  TORCH_CHECK(tensor.numel() == 0 || address(*tensor.unsafeGetTensorImpl()) != nullptr, what,
              tensor.has_storage() ? " has had its storage freed" : " has no storage");
}

void check_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& param,
                   const Label& param_what) {
  TORCH_CHECK(tensor.sizes() == param.sizes(), what, " has shape ", tensor.sizes(), ", expected ",
              param.sizes(), " as ", param_what);
  TORCH_CHECK(tensor.device() == param.device(), what, " is on ", tensor.device(), ", expected ",
              param.device(), " as ", param_what);
  TORCH_CHECK(same_layout(tensor, param), what, " has strides ", tensor.strides(), ", expected ",
              param.strides(), " as ", param_what);
}

void check_dense(const at::Tensor& tensor, const Label& what) {
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), what, " with shape ", tensor.sizes(),
              " and strides ", tensor.strides(),
              " is not dense: its elements overlap or leave gaps");
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() <= 1 || has_shape(*a.unsafeGetTensorImpl(), shape_of(b));
}

namespace {

// Returns stride and size of each dimension with more than one element, smallest stride first.
std::vector<std::pair<int64_t, int64_t>> sorted_strides(const c10::TensorImpl& tensor) {
  std::vector<std::pair<int64_t, int64_t>> stride_and_size;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) {
      stride_and_size.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(stride_and_size.begin(), stride_and_size.end());
  return stride_and_size;
}

// Memory of tensor number `source`.
struct MemoryRange {
  const char* begin;
  const char* end;
  size_t source;
  bool written;
};

// Appends the memory of a tensor that has elements, gaps between the elements included.
void append_span(const c10::TensorImpl& tensor, size_t source, bool written,
                 std::vector<MemoryRange>& ranges) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    elements += (sizes[d] - 1) * strides[d];
  }
  const auto* begin = static_cast<const char*>(address(tensor));
  ranges.push_back(
      {begin, begin + elements * static_cast<int64_t>(tensor.itemsize()), source, written});
}

// Appends the tensor's runs of elements without gaps: tensors may lie in each other's gaps.
void append_runs(const c10::TensorImpl& tensor, size_t source, bool written,
                 std::vector<MemoryRange>& ranges) {
  int64_t run = 1;
  std::vector<int64_t> starts{0};
  for (const auto& [stride, size] : sorted_strides(tensor)) {
    if (stride == run) {
      run *= size;
      continue;
    }
    const size_t before = starts.size();
    for (int64_t k = 1; k < size && stride != 0; ++k) {
      for (size_t i = 0; i < before; ++i) {
        starts.push_back(starts[i] + k * stride);
      }
    }
  }
  const auto bytes = static_cast<int64_t>(tensor.itemsize());
  for (const int64_t start : starts) {
    const char* begin = static_cast<const char*>(address(tensor)) + start * bytes;
    ranges.push_back({begin, begin + run * bytes, source, written});
  }
}

// The addresses of tensors that were allocated one after another ascend. Merging a few such lists
// takes a third of the time of sorting them.
void sort_ascending_lists(std::vector<MemoryRange>& ranges) {
  const auto lies_before = [](const MemoryRange& a, const MemoryRange& b) {
    return a.begin < b.begin;
  };
  constexpr int kLists = 16;
  auto sorted = std::is_sorted_until(ranges.begin(), ranges.end(), lies_before);
  for (int i = 0; i < kLists && sorted != ranges.end(); ++i) {
    const auto next = std::is_sorted_until(sorted, ranges.end(), lies_before);
    std::inplace_merge(ranges.begin(), sorted, next, lies_before);
    sorted = next;
  }
  if (sorted != ranges.end()) {
    std::sort(ranges.begin(), ranges.end(), lies_before);
  }
}

// Finds an overlap of the ranges that append(tensor, position, written, ranges) appends.
template <class Append>
std::optional<std::pair<size_t, size_t>> find_overlap_of(const std::vector<UsedTensor>& tensors,
                                                         const Append& append) {
  std::vector<MemoryRange> ranges;
  ranges.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [tensor, written] = tensors[i];
    if (tensor != nullptr && tensor->numel() > 0) {
      append(*tensor, i, written, ranges);
    }
  }
  sort_ascending_lists(ranges);
  // The ranges that reach furthest so far, among the written ranges and among all ranges.
  const MemoryRange* written = nullptr;
  const MemoryRange* any = nullptr;
  for (const MemoryRange& range : ranges) {
    const MemoryRange* other = range.written ? any : written;
    if (other != nullptr && range.begin < other->end) {
      return std::pair(range.source, other->source);
    }
    if (range.written && (written == nullptr || range.end > written->end)) {
      written = &range;
    }
    if (any == nullptr || range.end > any->end) {
      any = &range;
    }
  }
  return std::nullopt;
}

}  // namespace

void check_no_internal_overlap(const at::Tensor& tensor, const Label& what) {
  int64_t last = 0;  // offset of the last element spanned so far
  for (const auto& [stride, size] : sorted_strides(*tensor.unsafeGetTensorImpl())) {
    TORCH_CHECK(tensor.numel() == 0 || stride > last, what, " with shape ", tensor.sizes(),
                " and strides ", tensor.strides(), " has elements that may share memory");
    last += stride * (size - 1);
  }
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<UsedTensor>& tensors) {
  return find_overlap_of(tensors, append_span) ? find_overlap_of(tensors, append_runs)
                                               : std::nullopt;
}

void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

int64_t row_length(const at::Tensor& tensor) {
  const int64_t reals = reals_per_element(tensor);
  if (tensor.dim() == 0 || tensor.numel() == 0) {
    return reals;
  }
  // One row stays one row, however its elements are permuted: it may be a shard of several rows.
  int64_t outer = 0;
  for (int64_t d = 1; d < tensor.dim() && tensor.size(0) > 1; ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) > tensor.stride(outer)) {
      outer = d;
    }
  }
  return reals * (tensor.numel() / tensor.size(outer));
}

}  // namespace torchopt_ext

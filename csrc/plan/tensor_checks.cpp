#include "plan/tensor_checks.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "kernels/control.h"
#include "kernels/exact_accumulator.h"
#include "plan/tensor_fields.h"
#include "work/host_memory.h"

namespace torchopt_ext {

std::ostream& operator<<(std::ostream& out, const Label& label) {
  out << label.role << label.suffix;
  if (label.index) {
    out << " " << *label.index;
  }
  if (label.name != nullptr && !label.name->empty()) {
    out << " ('" << *label.name << "')";
  }
  return out;
}

void check_supported(const at::Tensor& tensor, const Label& what, bool complex) {
  TORCH_CHECK(tensor.defined(), what, " is not defined");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(complex || !tensor.is_complex(), what, " has dtype ", dtype_name(dtype),
              "; complex tensors are not supported: pass torch.view_as_real() of it");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
                  dtype == at::kHalf || dtype == at::kComplexFloat || dtype == at::kComplexDouble,
              what, " has dtype ", dtype_name(dtype),
              ", expected float32, float64, bfloat16 or float16",
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

namespace {

void check_sizes(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                 const Label& other_what) {
  TORCH_CHECK(tensor.sizes() == other.sizes(), what, " has shape ", tensor.sizes(), ", expected ",
              other.sizes(), " as ", other_what);
}

void check_strides(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                   const Label& other_what) {
  TORCH_CHECK(same_layout(tensor, other), what, " has strides ", tensor.strides(), ", expected ",
              other.strides(), " as ", other_what);
}

}  // namespace

void check_like(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                const Label& other_what) {
  check_sizes(tensor, what, other, other_what);
  TORCH_CHECK(tensor.device() == other.device(), what, " is on ", tensor.device(), ", expected ",
              other.device(), " as ", other_what);
}

void check_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                   const Label& other_what) {
  check_like(tensor, what, other, other_what);
  check_strides(tensor, what, other, other_what);
}

void check_state_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                         const Label& other_what) {
  if (tensor.is_cpu() && is_host_memory(address(*tensor.unsafeGetTensorImpl()))) {
    check_sizes(tensor, what, other, other_what);
  } else {
    check_like(tensor, what, other, other_what);
  }
  check_strides(tensor, what, other, other_what);
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

void check_block(const at::Tensor& tensor, const Label& what, at::ScalarType dtype, int64_t numel,
                 std::optional<at::Device> device) {
  TORCH_CHECK(!device || tensor.device() == *device, what, " is on ", tensor.device(),
              ", expected ", *device);
  check_memory(tensor, what);
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous(),
              what, " is ", dtype_name(tensor.scalar_type()), tensor.sizes(),
              ", expected contiguous ", dtype_name(dtype), "[", numel, "]");
}

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

// Calls add(begin, end) for the memory of a tensor, gaps between its elements included, in elements
// from its address on.
constexpr auto visit_span = [](const c10::TensorImpl& tensor, const auto& add) {
  int64_t end = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    end += (tensor.size(d) - 1) * tensor.stride(d);
  }
  add(0, end);
};

// The same for each run of elements without gaps: tensors may lie in each other's gaps.
constexpr auto visit_runs = [](const c10::TensorImpl& tensor, const auto& add) {
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
  for (const int64_t start : starts) {
    add(start, start + run);
  }
};

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

template <class Visit>
std::optional<std::pair<size_t, size_t>> find_overlap_of(const std::vector<UsedTensor>& tensors,
                                                         const Visit& visit_memory) {
  std::vector<MemoryRange> ranges;
  ranges.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const c10::TensorImpl* tensor = tensors[i].tensor;
    if (tensor == nullptr || tensor->numel() == 0) {
      continue;
    }
    const auto* memory = static_cast<const char*>(address(*tensor));
    const auto bytes = static_cast<int64_t>(tensor->itemsize());
    visit_memory(*tensor, [&](int64_t begin, int64_t end) {
      ranges.push_back({memory + begin * bytes, memory + end * bytes, i, tensors[i].written});
    });
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
  return find_overlap_of(tensors, visit_span) ? find_overlap_of(tensors, visit_runs) : std::nullopt;
}

void check_accumulator(const at::Tensor& accumulator, std::optional<at::Device> device) {
  check_block(accumulator, {"accumulator"}, at::kLong, ExactAccumulator::kSize, device);
}

void check_control(const at::Tensor& control, std::optional<at::Device> device) {
  check_block(control, {"control"}, at::kDouble, kControlSize, device);
}

void check_scalar(const at::Tensor& tensor, const char* what, at::Device device, bool or_double) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.numel() == 1 && tensor.device() == device &&
                  (dtype == at::kFloat || (or_double && dtype == at::kDouble)) &&
                  address(*tensor.unsafeGetTensorImpl()) != nullptr,
              what, " is not one float32", or_double ? " or float64" : "", " element on ", device,
              ", or has had its storage freed");
}

void check_hyper(Algorithm algorithm, const Hyper& hyper) {
  size_t i = 0;
  for (const HyperSpec& spec : declaration_of(algorithm).hypers) {
    const double value = hyper.value[i++];
    const bool fits = !std::isnan(value) && (spec.range == Range::kAny || value >= 0.0) &&
                      (spec.range != Range::kBelowOne || value < 1.0);
    TORCH_CHECK_VALUE(fits, "Invalid ", spec.invalid, ": ", value);
  }
  TORCH_CHECK_VALUE(hyper[kDecoupled] != 0.0 || (hyper[kCautious] == 0.0 && hyper[kPeakLr] == 0.0),
                    "cautious_weight_decay and decay_follows_lr require decoupled_weight_decay");
  with_algorithm(algorithm, [&](auto a) {
    if constexpr (requires { a.problem(hyper); }) {
      const char* problem = a.problem(hyper);
      TORCH_CHECK_VALUE(problem == nullptr, problem);
    }
  });
}

void check_lr(const at::Tensor& lr, at::Device device) {
  TORCH_CHECK(lr.numel() == 1, "lr has ", lr.numel(), " elements, expected 1");
  TORCH_CHECK(lr.scalar_type() == at::kFloat || lr.scalar_type() == at::kDouble, "lr has dtype ",
              dtype_name(lr.scalar_type()), ", expected float32 or float64");
  TORCH_CHECK(lr.is_cpu() || lr.device() == device, "lr is on ", lr.device(),
              ", expected the CPU or ", device);
  TORCH_CHECK(lr.layout() == at::kStrided && address(*lr.unsafeGetTensorImpl()) != nullptr,
              "lr has no memory to be read: it has layout ", lr.layout(),
              ", or has had its storage freed");
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

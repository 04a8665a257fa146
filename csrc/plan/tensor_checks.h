// Checks on the tensors of a step, all made before anything is written. Messages name the tensor's
// role, position and, where known, the parameter's name.
#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"

namespace torchopt_ext {

// "gradient 3 ('layers.0.wq.weight')". Put together only where it is written: a call checks
// thousands of tensors, and names of them take longer than the checks.
struct Label {
  const char* role;
  size_t index;
  const std::string* name = nullptr;  // may be empty
};
std::ostream& operator<<(std::ostream& out, const Label& label);

// Of the real numbers in memory: a complex tensor is stepped as torch::view_as_real() shows it.
DType dtype_of(const at::Tensor& tensor);
inline int64_t reals_per_element(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

// Strided, of a supported dtype, with memory. Complex tensors only if `complex`.
void check_supported(const at::Tensor& tensor, const Label& what, bool complex = false);

// Strided memory that holds the values as they are.
void check_memory(const at::Tensor& tensor, const Label& what);

// Same shape, device and strides as the parameter, so that element index means the same in both.
void check_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& param,
                   const Label& param_what);

// Elements are not shared and leave no gaps: storage order covers every element once.
void check_dense(const at::Tensor& tensor, const Label& what);
bool is_dense(const at::Tensor& tensor);
// The same for a tensor with gaps, sufficiently: every stride spans all smaller ones.
void check_no_internal_overlap(const at::Tensor& tensor, const Label& what);

// Memory does not hold the values as they are: negation, conjugation or zeros yet to be done.
bool is_lazy(const at::Tensor& tensor);

// Same strides wherever a dimension has more than one element.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// A tensor among those of which none that is written shares memory with another.
struct NamedTensor {
  const c10::TensorImpl* tensor;
  Label what;
  bool written;
};
// Whether two may share memory: a tensor's gaps count as its own.
bool may_overlap(const std::vector<NamedTensor>& tensors);
// Raises if two do, and names them.
void check_no_overlap(const std::vector<NamedTensor>& tensors);

// Where the elements of tensor number `source` lie, with the gaps between them.
struct MemoryRange {
  const char* begin;
  const char* end;
  size_t source;
  bool written;
};
MemoryRange memory_of(const c10::TensorImpl& tensor, size_t source, bool written);

// The sources of two ranges, of which one is written, that share memory. Sorts the ranges, fast if
// they are a few ascending lists one after another.
std::optional<std::pair<size_t, size_t>> find_overlap(std::vector<MemoryRange>& ranges);

// Counts as an in-place change for autograd, as torch's own operators do.
void bump_version(const at::Tensor& tensor);

// The unit that blocks of the sum of squares never cross, in real numbers: docs/numerics.md
// section 3.
int64_t row_length(const at::Tensor& tensor);

}  // namespace torchopt_ext

// Checks of a step's tensors and other arguments, all made before anything is written. Messages
// name the tensor's role, position and, where known, the parameter's name.
#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "work/passes.h"

namespace torchopt_ext {

// A name such as "gradient 3 ('layers.0.wq.weight')". The string is built only when it is written:
// a call checks thousands of tensors, and building their names takes longer than the checks.
struct Label {
  const char* role;
  std::optional<size_t> index = std::nullopt;
  const std::string* name = nullptr;  // may be empty
  const char* suffix = "";            // of the role
};
std::ostream& operator<<(std::ostream& out, const Label& label);

// Raises unless check_memory() passes and the dtype is supported. Complex dtypes need `complex`.
void check_supported(const at::Tensor& tensor, const Label& what, bool complex = false);

// Raises unless the tensor is strided and has memory that holds its values: not is_lazy().
void check_memory(const at::Tensor& tensor, const Label& what);

// Raises unless shape and device are those of `other`.
void check_like(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                const Label& other_what);
// Raises unless shape, device and strides are those of `other`, so that element indices agree.
void check_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                   const Label& other_what);
// The same of a parameter's state, which may also be in host memory that the device can access
// (work/host_memory.h).
void check_state_matches(const at::Tensor& tensor, const Label& what, const at::Tensor& other,
                         const Label& other_what);

// Raises unless storage order covers every element once: no overlap between elements, no gaps.
void check_dense(const at::Tensor& tensor, const Label& what);
// Raises unless each stride spans all smaller strides: no elements overlap then. Allows gaps.
void check_no_internal_overlap(const at::Tensor& tensor, const Label& what);

// Whether memory does not hold the tensor's values: negation, conjugation or zeros are pending.
inline bool is_lazy(const at::Tensor& tensor) {
  return tensor.is_neg() || tensor.is_conj() || tensor._is_zerotensor();
}

// Whether the strides agree in every dimension with more than one element.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// A tensor of an overlap check; null tensors are left out. A written tensor must not share memory
// with another tensor.
struct UsedTensor {
  const c10::TensorImpl* tensor;
  bool written;
};
// Returns the positions of two tensors that share memory and of which at least one is written. Fast
// if addresses are a few ascending lists one after another.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<UsedTensor>& tensors);

// Without `device` the tensor may be on any device.
void check_accumulator(const at::Tensor& accumulator,
                       std::optional<at::Device> device = std::nullopt);
void check_control(const at::Tensor& control, std::optional<at::Device> device = std::nullopt);
// Raises unless `tensor` is one element of float32 or, with `or_double`, float64.
void check_scalar(const at::Tensor& tensor, const char* what, at::Device device,
                  bool or_double = false);
// Raises, naming the argument, outside the declared ranges.
void check_hyper(Algorithm algorithm, const Hyper& hyper);
void check_lr(const at::Tensor& lr, at::Device device);

// Returns the length, in real numbers, of the rows that blocks of the sum of squares never cross
// (docs/numerics.md section 3).
int64_t row_length(const at::Tensor& tensor);

}  // namespace torchopt_ext

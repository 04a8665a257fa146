// Pass A in backward (optim/norm_in_backward.py): sums the squares of some gradients and marks the
// gradients, so that the step sees whether they changed.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "plan/tensor_fields.h"

namespace torchopt_ext {

// A tensor as it was at one time. The mark keeps neither the tensor nor its memory alive. It holds
// the version counter, so that a later tensor at the same address has another counter.
class TensorMark {
 public:
  explicit TensorMark(const at::Tensor& tensor)
      : memory_(address(*tensor.unsafeGetTensorImpl())),
        shape_(shape_of(tensor)),
        dtype_(tensor.scalar_type()),
        counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.enabled() ? counter_.current_version() : 0) {}

  // Whether a tensor is the same view of the same memory, and no operator has written to it since.
  // False also for tensors of inference mode, whose changes are not counted.
  bool fits(const at::Tensor& tensor) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return address(impl) == memory_ && tensor.scalar_type() == dtype_ && has_shape(impl, shape_) &&
           shares_version(counter_, impl.version_counter()) &&
           counter_.current_version() == version_;
  }

  // Whether a change of one tensor counts as a change of the other, as with views of one tensor.
  bool changes_with(const TensorMark& other) const {
    return shares_version(counter_, other.counter_);
  }

 private:
  const void* memory_;
  Shape shape_;
  at::ScalarType dtype_;
  c10::VariableVersion counter_;
  uint32_t version_;
};

using Marks = std::vector<std::shared_ptr<TensorMark>>;

// Adds the squares of the gradients that a plan reads without a copy: dense, with the layout of the
// tensor of `like` at their position. Returns a null mark for each gradient left out, which may be
// None. Without `gradients`, takes the gradients of `like`, which avoids a Python object for each.
Marks sum_gradients(const pybind11::list& like, const std::optional<pybind11::list>& gradients,
                    const at::Tensor& accumulator);

// Whether every parameter's gradient fits its mark. A null mark fits only an absent gradient.
bool gradients_fit(const pybind11::list& params, const Marks& marks);

}  // namespace torchopt_ext

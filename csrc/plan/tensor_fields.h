// Fields of tensors that a step plan reads and compares in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace torchopt_ext {

using Shape = c10::SmallVector<int64_t, 8>;  // sizes, then strides

// Needs the GIL if the tensor may have a Python object: taking the second reference to a tensor
// increments its Python object's count (c10/util/intrusive_ptr.h, PyObject preservation).
inline at::Tensor to_tensor(c10::TensorImpl* impl) {
  return impl == nullptr
             ? at::Tensor()
             : at::Tensor(
                   c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
                       impl));
}

inline bool is_16_bit(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

// Whether two handles refer to the same version counter, or both to none, as of inference tensors.
// torch has no such function; a handle is one pointer to its counter. A test that changes the
// counter would lose counts of other threads.
inline bool same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): all that a handle holds
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

inline bool shares_version(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return a.enabled() && same_counter(a, b);
}

// Reports an in-place change to autograd, as torch's own operators do. A tensor made in inference
// mode has no counter, also if its memory was replaced since (`param.data = ...`), whereupon
// is_inference() is false.
inline void bump_version(c10::TensorImpl* tensor) {
  if (tensor->version_counter().enabled()) {
    tensor->bump_version();
  }
}
inline void bump_version(const at::Tensor& tensor) { bump_version(tensor.unsafeGetTensorImpl()); }

// Returns the memory of a tensor; null if the tensor has none.
inline const void* address(const c10::TensorImpl& tensor) {
  const c10::Storage& storage = tensor.unsafe_storage();
  if (!storage || storage.data() == nullptr) {
    return nullptr;
  }
  return static_cast<const char*>(storage.data()) +
         static_cast<size_t>(tensor.storage_offset()) * tensor.dtype().itemsize();
}

inline Shape shape_of(const at::Tensor& tensor) {
  Shape shape(tensor.sizes().begin(), tensor.sizes().end());
  shape.append(tensor.strides().begin(), tensor.strides().end());
  return shape;
}

// Whether the sizes agree, and the strides in every dimension with more than one element.
inline bool has_shape(const c10::TensorImpl& tensor, const Shape& shape) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  const size_t dims = sizes.size();
  if (2 * dims != shape.size()) {
    return false;
  }
  for (size_t d = 0; d < dims; ++d) {
    if (sizes[d] != shape[d] || (sizes[d] > 1 && strides[d] != shape[dims + d])) {
      return false;
    }
  }
  return true;
}

}  // namespace torchopt_ext

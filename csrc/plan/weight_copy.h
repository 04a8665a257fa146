// A 16-bit copy of an fp32 weight, which is read instead of casting the weight
// (torchopt_ext/fsdp.py). While the copy has the weight's values, it has the weight's version, too:
// the weight's counter counts changes from outside, and the copy's counter is set only here.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

inline bool has_version_of(const c10::TensorImpl& copy, const c10::TensorImpl& weight) {
  return copy.version_counter().current_version() == weight.version_counter().current_version();
}

inline void set_version_of(const c10::TensorImpl& copy, const c10::TensorImpl& weight) {
  c10::VariableVersion counter = copy.version_counter();  // another handle to the counter
  counter.set_version(weight.version_counter().current_version());
}

// Overwrites the copy's values and version. Must be called without autograd.
inline void renew_copy(const at::Tensor& copy, const at::Tensor& weight) {
  copy.copy_(weight);
  set_version_of(*copy.unsafeGetTensorImpl(), *weight.unsafeGetTensorImpl());
}

}  // namespace torchopt_ext

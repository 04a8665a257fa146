// A 16-bit copy of an fp32 weight, which others read instead of casting the weight
// (torchopt_ext/fsdp.py). For as long as it has the weight's values, it has its version, too: the
// weight's counter counts changes from outside, a copy's is set only here.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchopt_ext {

inline bool has_version_of(const c10::TensorImpl& copy, const c10::TensorImpl& weight) {
  return copy.version_counter().current_version() == weight.version_counter().current_version();
}

inline void set_version_of(const c10::TensorImpl& copy, const c10::TensorImpl& weight) {
  c10::VariableVersion counter = copy.version_counter();  // another handle of it
  counter.set_version(weight.version_counter().current_version());
}

// To be called without autograd.
inline void renew_copy(const at::Tensor& copy, const at::Tensor& weight) {
  copy.copy_(weight);
  set_version_of(*copy.unsafeGetTensorImpl(), *weight.unsafeGetTensorImpl());
}

}  // namespace torchopt_ext

// This step's gradients of some tensors as a kernel's parameter: they need no upload, and a
// captured graph holds them itself. A kernel takes at most 32,764 bytes of parameters (CUDA 12.1,
// sm_70); longer lists take several launches.
#pragma once

#include <cstdint>

namespace torchopt_ext {

struct Gradients {
  static constexpr int kMost = 3456;

  int32_t first;        // tensor
  int32_t count;        // of tensors
  void* memory[kMost];  // null: no gradient
};

}  // namespace torchopt_ext

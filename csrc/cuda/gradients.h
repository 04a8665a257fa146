// This step's gradients of some tensors as a kernel's parameter: they need no upload, and a
// captured graph holds them itself. A kernel takes at most 32,764 bytes of parameters (CUDA 12.1,
// sm_70); longer lists take several launches. A launch copies all of them, which costs 6 us for 27
// KB and 1 us for 4 KB: most models have few enough tensors for that.
#pragma once

#include <cstdint>

namespace torchopt_ext {

template <int kTensors>
struct GradientsOf {
  static constexpr int kMost = kTensors;

  int32_t first;        // tensor
  int32_t count;        // of tensors
  void* memory[kMost];  // null: no gradient
};
using Gradients = GradientsOf<3456>;
using FewGradients = GradientsOf<480>;

}  // namespace torchopt_ext

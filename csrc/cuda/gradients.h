// This step's gradients of a range of tensors as a kernel parameter: the pointers need no upload,
// and a captured graph holds them. A kernel takes at most 32,764 bytes of parameters (CUDA 12.1,
// sm_70); longer lists take several launches. A launch copies the whole parameter, in 6 us for 27
// KB and 1 us for 4 KB, so the kernels are compiled for three lengths. Most models have few enough
// tensors for 4 KB.
#pragma once

#include <cstdint>

namespace torchopt_ext {

inline constexpr int kFewTensors = 480;
inline constexpr int kSomeTensors = 2048;
inline constexpr int kMostTensors = 3456;

template <int kTensors>
struct GradientPointers {
  static constexpr int kMost = kTensors;

  int32_t first;        // index of the first tensor
  int32_t count;        // number of tensors
  void* memory[kMost];  // null: no gradient
};

}  // namespace torchopt_ext

// Stands in for torch's header where the host is the device. Few multiprocessors make each block of
// pass A take several chunks.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstring>

inline void cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
}

namespace at::cuda {

struct DeviceProperties {
  int multiProcessorCount = 2;
};
inline const DeviceProperties* getCurrentDeviceProperties() {
  static constexpr DeviceProperties properties;
  return &properties;
}
inline c10::cuda::CUDAStream getCurrentCUDAStream() { return {}; }

}  // namespace at::cuda

// A table of plain values in a device's memory, kept between steps and uploaded when it changes:
// asynchronously, from pinned memory, without waiting for the device.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

namespace torchopt_ext {

class DeviceTable {
 public:
  // Where work on the stream finds these values from now on.
  template <class T>
  const T* upload(const std::vector<T>& values, c10::cuda::CUDAStream stream) {
    return static_cast<const T*>(upload(values.data(), values.size() * sizeof(T), stream));
  }

  // Memory for `bytes`, not written here.
  void* reserve(size_t bytes, c10::cuda::CUDAStream stream);

 private:
  const void* upload(const void* values, size_t bytes, c10::cuda::CUDAStream stream);

  c10::DataPtr memory_;
  size_t capacity_ = 0;
  std::vector<char> uploaded_;          // what was sent last
  unsigned long long uploaded_by_ = 0;  // the capture that did; 0: none
  // The sources of uploads that CUDA graphs repeat: kept, and never written again.
  std::vector<c10::DataPtr> captured_;
};

}  // namespace torchopt_ext

// A table of plain values in a device's memory, kept between steps and uploaded when it changes:
// asynchronously, from pinned memory, without waiting for the device.
//
// A captured CUDA graph uploads it again whenever it is replayed, and nothing tells when that was
// the last time. So what a graph reads and writes is kept for good: of an operator's call, whose
// table is gone when it returns, as of a plan that was rebuilt.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

namespace torchopt_ext {

class DeviceTable {
 public:
  DeviceTable() = default;
  ~DeviceTable();
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

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
  bool in_graphs_ = false;              // some graph reads or writes memory_
};

}  // namespace torchopt_ext

// Plain values in a device's memory, uploaded once, when a work list is first run: from pinned
// memory, without waiting for the device.
//
// A captured CUDA graph holds the tables of its work lists and gives them back with itself. It
// uploads nothing when it is replayed.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <vector>

namespace torchopt_ext {

class DeviceTable {
 public:
  bool empty() const { return memory_.get() == nullptr; }

  // Once.
  template <class T>
  void fill(const std::vector<T>& values, c10::cuda::CUDAStream stream) {
    fill(values.data(), values.size() * sizeof(T), stream);
  }
  // Memory that is not written here.
  void reserve(size_t bytes);

  // Where work on the stream finds the values.
  template <class T>
  T* on(c10::cuda::CUDAStream stream) {
    return static_cast<T*>(used_on(stream));
  }

 private:
  void fill(const void* values, size_t bytes, c10::cuda::CUDAStream stream);
  void* used_on(c10::cuda::CUDAStream stream);

  c10::DataPtr memory_;
};

// If the stream is captured, the graph keeps the tables.
void keep_with_graph(const std::shared_ptr<void>& tables, c10::cuda::CUDAStream stream);

}  // namespace torchopt_ext

// Plain values in a device's memory. They are uploaded once, when a work list is first run: from
// pinned memory without waiting for the device, or, during a capture, from pageable memory.
//
// A captured CUDA graph keeps the tables of its work lists until the graph is destroyed, and states
// on the host, which it reads by their addresses. A replay uploads nothing.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <vector>

namespace torchopt_ext {

class DeviceTable {
 public:
  bool empty() const { return memory_.get() == nullptr; }

  // Allocates the memory and uploads the values. Call once.
  template <class T>
  void upload(const std::vector<T>& values, c10::cuda::CUDAStream stream) {
    upload(values.data(), values.size() * sizeof(T), stream);
  }
  // Allocates memory without writing to it.
  void reserve(size_t bytes);

  // Returns the address of the values for work on the stream.
  template <class T>
  T* address(c10::cuda::CUDAStream stream) {
    return static_cast<T*>(record_use(stream));
  }

 private:
  void upload(const void* values, size_t bytes, c10::cuda::CUDAStream stream);
  void* record_use(c10::cuda::CUDAStream stream);

  c10::DataPtr memory_;
};

// If the stream is being captured, makes the graph keep the tables, and returns true.
bool keep_with_graph(const std::shared_ptr<void>& tables, c10::cuda::CUDAStream stream);

// Frees what destroyed graphs have kept. Passes outside of a capture do so, too. Waits for the
// device if states on the host are freed.
void free_released();

}  // namespace torchopt_ext

#include "cuda/device_table.h"

#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace torchopt_ext {
namespace {

// A number for each capture of a CUDA graph; 0 if the stream is not captured.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

void keep_for_good(c10::DataPtr memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<c10::DataPtr>();  // outlives CUDA's own end
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace

DeviceTable::~DeviceTable() {
  if (in_graphs_) {
    keep_for_good(std::move(memory_));
  }
}

void* DeviceTable::reserve(size_t bytes, c10::cuda::CUDAStream stream) {
  if (bytes > capacity_) {
    if (in_graphs_) {
      keep_for_good(std::move(memory_));
      in_graphs_ = false;
    }
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
    capacity_ = bytes;
    uploaded_.clear();
  }
  in_graphs_ = in_graphs_ || capture_of(stream) != 0;
  // The allocator reuses memory in the order of the stream that it was allocated on.
  c10::cuda::CUDACachingAllocator::recordStream(memory_, stream);
  return memory_.get();
}

const void* DeviceTable::upload(const void* values, size_t bytes, c10::cuda::CUDAStream stream) {
  void* const memory = reserve(bytes, stream);
  const unsigned long long capture = capture_of(stream);
  // A graph uploads whatever it needs itself, as it is replayed after other steps. And when it is
  // replayed, it changes the table unseen.
  const bool known = capture != 0 ? capture == uploaded_by_ : !in_graphs_;
  if (known && uploaded_.size() == bytes && std::memcmp(uploaded_.data(), values, bytes) == 0) {
    return memory;
  }
  // Nothing below but the copy is part of a capture.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
  c10::DataPtr pinned = host.allocate(bytes);
  std::memcpy(pinned.get(), values, bytes);
  C10_CUDA_CHECK(cudaMemcpyAsync(memory, pinned.get(), bytes, cudaMemcpyHostToDevice, stream));
  if (capture != 0) {
    keep_for_good(std::move(pinned));
  } else {
    host.record_event(pinned.get(), pinned.get_context(), stream.unwrap());  // not reused before
  }
  const auto* first = static_cast<const char*>(values);
  uploaded_.assign(first, first + bytes);
  uploaded_by_ = capture;
  return memory;
}

}  // namespace torchopt_ext

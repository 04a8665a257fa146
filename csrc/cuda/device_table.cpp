#include "cuda/device_table.h"

#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace torchopt_ext {
namespace {

// The graph that a stream is captured into; null if it is not captured.
cudaGraph_t graph_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph));
  return status == cudaStreamCaptureStatusActive ? graph : nullptr;
}

c10::DataPtr allocate(size_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

// The tables of graphs that are gone, until the next pass: CUDA tells of a graph's end where CUDA
// must not be called, as freeing memory does.
struct Released {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> tables;
};

Released& released() {
  static auto& all = *new Released();  // outlives CUDA's own end
  return all;
}

void release(void* tables) {
  const std::unique_ptr<std::shared_ptr<void>> held(static_cast<std::shared_ptr<void>*>(tables));
  const std::scoped_lock lock(released().mutex);
  released().tables.push_back(std::move(*held));
}

void free_released() {
  std::vector<std::shared_ptr<void>> tables;
  const std::scoped_lock lock(released().mutex);
  tables.swap(released().tables);
}

}  // namespace

void DeviceTable::fill(const void* values, size_t bytes, c10::cuda::CUDAStream stream) {
  if (graph_of(stream) != nullptr) {
    // Now and not when the graph is replayed, so on another stream. Nor may the memory come from
    // the graph's pool: a replay's earlier kernels may write to it.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    c10::cuda::CUDAStream other = stream;
    while (graph_of(other) != nullptr) {  // the pool gives its streams in turn, captured ones too
      other = c10::cuda::getStreamFromPool(false, stream.device_index());
    }
    const c10::cuda::CUDAStreamGuard guard(other);
    memory_ = allocate(bytes);
    C10_CUDA_CHECK(
        cudaMemcpyAsync(memory_.get(), values, bytes, cudaMemcpyHostToDevice, other.stream()));
    C10_CUDA_CHECK(cudaStreamSynchronize(other.stream()));
    return;
  }
  memory_ = allocate(bytes);
  at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
  const c10::DataPtr pinned = host.allocate(bytes);
  std::memcpy(pinned.get(), values, bytes);
  C10_CUDA_CHECK(
      cudaMemcpyAsync(memory_.get(), pinned.get(), bytes, cudaMemcpyHostToDevice, stream));
  host.record_event(pinned.get(), pinned.get_context(), stream.unwrap());  // not reused before
}

void DeviceTable::reserve(size_t bytes) { memory_ = allocate(bytes); }

// The allocator reuses memory in the order of the stream that it was allocated on.
void* DeviceTable::used_on(c10::cuda::CUDAStream stream) {
  if (graph_of(stream) == nullptr) {
    c10::cuda::CUDACachingAllocator::recordStream(memory_, stream);
  }
  return memory_.get();
}

void keep_with_graph(const std::shared_ptr<void>& tables, c10::cuda::CUDAStream stream) {
  free_released();
  cudaGraph_t const graph = graph_of(stream);
  if (graph == nullptr) {
    return;
  }
  auto held = std::make_unique<std::shared_ptr<void>>(tables);
  cudaUserObject_t object = nullptr;
  C10_CUDA_CHECK(
      cudaUserObjectCreate(&object, held.get(), release, 1, cudaUserObjectNoDestructorSync));
  held.release();  // NOLINT(bugprone-unused-return-value): the object's
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
}

}  // namespace torchopt_ext

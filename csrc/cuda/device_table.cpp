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

// Returns the graph that a stream is being captured into, or null.
cudaGraph_t graph_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph));
  return status == cudaStreamCaptureStatusActive ? graph : nullptr;
}

c10::DataPtr allocate(size_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

// What destroyed graphs have kept, until the next pass or lock of pages. CUDA reports a graph's
// destruction in a callback that must not call CUDA, and freeing memory calls CUDA.
struct Released {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> tables;
};

Released& released() {
  static auto& all = *new Released();  // leaked: must outlive CUDA's shutdown
  return all;
}

void release(void* tables) {
  const std::unique_ptr<std::shared_ptr<void>> held(static_cast<std::shared_ptr<void>*>(tables));
  const std::scoped_lock lock(released().mutex);
  released().tables.push_back(std::move(*held));
}

}  // namespace

void free_released() {
  std::vector<std::shared_ptr<void>> tables;
  const std::scoped_lock lock(released().mutex);
  tables.swap(released().tables);
}

void DeviceTable::upload(const void* values, size_t bytes, c10::cuda::CUDAStream stream) {
  if (graph_of(stream) != nullptr) {
    // The upload must run during the capture and not at each replay, so it uses another stream. The
    // memory must not come from the graph's pool, to which a replay's earlier kernels may write.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    c10::cuda::CUDAStream other = stream;
    while (graph_of(other) != nullptr) {  // streams come round robin, captured streams included
      other = c10::cuda::getStreamFromPool(false, stream.device_index());
    }
    const c10::cuda::CUDAStreamGuard guard(other);
    c10::DataPtr memory = allocate(bytes);
    C10_CUDA_CHECK(
        cudaMemcpyAsync(memory.get(), values, bytes, cudaMemcpyHostToDevice, other.stream()));
    C10_CUDA_CHECK(cudaStreamSynchronize(other.stream()));
    memory_ = std::move(memory);  // last: after an error the table is still empty
    return;
  }
  c10::DataPtr memory = allocate(bytes);
  at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
  const c10::DataPtr pinned = host.allocate(bytes);
  std::memcpy(pinned.get(), values, bytes);
  C10_CUDA_CHECK(
      cudaMemcpyAsync(memory.get(), pinned.get(), bytes, cudaMemcpyHostToDevice, stream));
  host.record_event(pinned.get(), pinned.get_context(), stream.unwrap());  // reused after the copy
  memory_ = std::move(memory);
}

void DeviceTable::reserve(size_t bytes) { memory_ = allocate(bytes); }

// Records the use on `stream`: the allocator orders reuse only with the allocation's stream.
void* DeviceTable::record_use(c10::cuda::CUDAStream stream) {
  if (graph_of(stream) == nullptr) {
    c10::cuda::CUDACachingAllocator::recordStream(memory_, stream);
  }
  return memory_.get();
}

bool keep_with_graph(const std::shared_ptr<void>& tables, c10::cuda::CUDAStream stream) {
  cudaGraph_t const graph = graph_of(stream);
  if (graph == nullptr) {
    free_released();  // not in a capture, which unlocking pages (host_memory.cpp) would end
    return false;
  }
  auto held = std::make_unique<std::shared_ptr<void>>(tables);
  cudaUserObject_t object = nullptr;
  C10_CUDA_CHECK(
      cudaUserObjectCreate(&object, held.get(), release, 1, cudaUserObjectNoDestructorSync));
  held.release();  // NOLINT(bugprone-unused-return-value): the object's
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  return true;
}

}  // namespace torchopt_ext

#include "cuda/staging.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>

namespace torchopt_ext {
namespace {

// Two streams of torch's pool. A GPU has a copy engine for each direction, so that copies do not
// wait for each other, nor for kernels.
class CudaStreams final : public StagingStreams {
 public:
  explicit CudaStreams(c10::Device device)
      : device_(device),
        up_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        down_(up_) {
    while (down_ == up_) {  // the pool's streams come round robin
      down_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
    }
    const c10::cuda::CUDAGuard guard(device);
    for (cudaEvent_t& event : events_) {
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;
  ~CudaStreams() override {
    for (cudaEvent_t event : events_) {
      static_cast<void>(cudaEventDestroy(event));  // at the end of the process the driver has gone
    }
  }

  void copy(StagingStream stream, void* to, const void* from, size_t bytes) override {
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, of(stream)));
  }
  void record(size_t event, StagingStream stream) override {
    C10_CUDA_CHECK(cudaEventRecord(events_[event], of(stream)));
  }
  void wait(StagingStream stream, size_t event) override {
    C10_CUDA_CHECK(cudaStreamWaitEvent(of(stream), events_[event], 0));
  }

 private:
  cudaStream_t of(StagingStream stream) const {
    return stream == StagingStream::kUp     ? up_
           : stream == StagingStream::kDown ? down_
                                            : c10::cuda::getCurrentCUDAStream(device_.index());
  }

  c10::Device device_;
  c10::cuda::CUDAStream up_;
  c10::cuda::CUDAStream down_;
  std::array<cudaEvent_t, kEvents> events_{};
};

}  // namespace

std::unique_ptr<StagingStreams> staging_streams(c10::Device device) {
  return std::make_unique<CudaStreams>(device);
}

}  // namespace torchopt_ext

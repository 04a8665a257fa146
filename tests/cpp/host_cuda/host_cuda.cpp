// The CUDA back end on the host, in place of the CPU's: csrc/cuda/passes.cpp runs with tables in
// the host's memory, and launches run the kernels' bodies in loops over grid, block and thread.
// Tests of the CPU then check the CUDA back end without a GPU (make test-host-cuda).
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../host_cta.h"
#include "cpu/float_mode.h"
#include "cuda/device_table.h"
#include "cuda/host_memory.h"
#include "cuda/launch.h"
#include "cuda/staging.h"
#include "work/passes.h"

namespace torchopt_ext {

const Passes& cpu::passes() { return cuda::passes(); }

// ---- tables -----------------------------------------------------------------------------------
// A test may limit the number of further tables.
void DeviceTable::reserve(size_t bytes) {
  if (const char* left = std::getenv("HOST_CUDA_TABLES")) {
    TORCH_CHECK_WITH(OutOfMemoryError, left != std::string("0"), "no memory for a table");
    setenv("HOST_CUDA_TABLES", std::to_string(std::stoi(left) - 1).c_str(), 1);
  }
  memory_ = c10::GetCPUAllocator()->allocate(bytes);
  std::memset(memory_.get(), 0xff, bytes);  // NaN, and addresses that cannot be read
}

void DeviceTable::upload(const void* values, size_t bytes, c10::cuda::CUDAStream) {
  reserve(bytes);
  std::memcpy(memory_.get(), values, bytes);
}

void* DeviceTable::record_use(c10::cuda::CUDAStream) { return memory_.get(); }

// While a test captures a graph, its passes run, too: only what the graph keeps is of interest.
namespace {

bool is_captured = false;
std::vector<std::shared_ptr<void>> kept_by_graph;

}  // namespace

bool keep_with_graph(const std::shared_ptr<void>& tables, c10::cuda::CUDAStream) {
  if (is_captured) {
    kept_by_graph.push_back(tables);
  }
  return is_captured;
}

// ---- memory of the host, which the device accesses ----------------------------------------------
// While protection is on, it can be accessed only while the device is at work: a step's own code
// that touches it is a fault. Tests switch it on by ctypes.
namespace {

std::map<void*, size_t> locked_pages;
int protection = 0;  // 1: kernels and copy engines may access it; 2: copy engines

void allow(bool access) {
  for (const auto& [memory, bytes] : locked_pages) {
    mprotect(memory, bytes, access ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

}  // namespace

void lock_pages(void* memory, size_t bytes, c10::Device) {
  TORCH_CHECK(std::getenv("HOST_CUDA_NO_LOCKS") == nullptr, "cannot lock ", bytes, " bytes");
  if (const char* milliseconds = std::getenv("HOST_CUDA_LOCK_MS")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(milliseconds)));
  }
  locked_pages[memory] = bytes;
}

bool unlock_pages(void* memory, size_t bytes, c10::Device) {
  mprotect(memory, bytes, PROT_READ | PROT_WRITE);
  locked_pages.erase(memory);
  return true;
}

}  // namespace torchopt_ext

extern "C" void host_cuda_protect(int how) {
  torchopt_ext::protection = how;
  torchopt_ext::allow(how == 0);
}

// Begins a capture, ends it, or destroys the graph.
extern "C" void host_cuda_capture(int on) { torchopt_ext::is_captured = on != 0; }
extern "C" void host_cuda_destroy_graph() { torchopt_ext::kept_by_graph.clear(); }

namespace torchopt_ext {

// ---- streams that copy --------------------------------------------------------------------------
// As late as a GPU's may: a stream does what another one waits for, and the rest at the end.
namespace {

class LateStreams final : public StagingStreams {
 public:
  void copy(StagingStream stream, void* to, const void* from, size_t bytes) override {
    in(stream).emplace_back([=] {
      if (protection != 0) {
        allow(true);
      }
      std::memcpy(to, from, bytes);
      if (protection != 0) {
        allow(false);
      }
    });
  }
  void record(size_t event, StagingStream stream) override {
    events_[event] = {stream,
                      stream == StagingStream::kCurrent ? 0 : done(stream) + in(stream).size()};
  }
  void wait(StagingStream stream, size_t event) override {
    const auto [of, count] = events_[event];
    if (of == StagingStream::kCurrent) {
      return;  // whose work is done at once
    }
    if (stream == StagingStream::kCurrent) {
      run(of, count);
    } else {
      in(stream).emplace_back([this, of = of, count = count] { run(of, count); });
    }
  }

 private:
  // The work of a stream, and how much of it has been done.
  struct Queue {
    std::deque<std::function<void()>> work;
    size_t done = 0;
  };
  std::deque<std::function<void()>>& in(StagingStream stream) {
    TORCH_INTERNAL_ASSERT(stream != StagingStream::kCurrent);
    return queues_[static_cast<size_t>(stream)].work;
  }
  size_t done(StagingStream stream) const { return queues_[static_cast<size_t>(stream)].done; }
  void run(StagingStream stream, size_t count) {
    Queue& queue = queues_[static_cast<size_t>(stream)];
    while (queue.done < count) {
      const auto next = std::move(queue.work.front());
      queue.work.pop_front();
      ++queue.done;
      next();
    }
  }

  std::array<Queue, 3> queues_;
  std::array<std::pair<StagingStream, size_t>, kEvents> events_;
};

}  // namespace

std::unique_ptr<StagingStreams> staging_streams(c10::Device) {
  return std::make_unique<LateStreams>();
}

// ---- launches ---------------------------------------------------------------------------------
namespace {

int64_t largest_grid = 0;

}  // namespace

// Checks the launch as CUDA does. A GPU's arithmetic does not follow the host's rounding mode.
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, cudaStream_t stream) {
  largest_grid = std::max(largest_grid, blocks);
  TORCH_INTERNAL_ASSERT(blocks > 0 && blocks <= INT32_MAX, "a grid of ", blocks, " blocks");
  TORCH_INTERNAL_ASSERT(stream == c10::cuda::CUDAStream{}, "not the current stream");
  const FloatMode mode;
  const bool opens = protection == 1;
  if (opens) {
    allow(true);
  }
  run_on_host(kernel, blocks);
  if (opens) {
    allow(false);
  }
}

}  // namespace torchopt_ext

// Returns the blocks of the largest launch since the last call.
extern "C" int64_t host_cuda_largest_grid() { return std::exchange(torchopt_ext::largest_grid, 0); }

#include "cuda/pass_b.cu"
#include "cuda/passes.cu"
#include "cuda/traced.cu"

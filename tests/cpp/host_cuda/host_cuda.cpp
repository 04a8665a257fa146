// The CUDA back end on the host, in place of the CPU's: csrc/cuda/passes.cpp runs with tables in
// the host's memory, and launches run the kernels' bodies in loops over grid, block and thread.
// Tests of the CPU then check the CUDA back end without a GPU (make test-host-cuda).
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../host_cta.h"
#include "cpu/float_mode.h"
#include "cuda/device_table.h"
#include "cuda/host_memory.h"
#include "cuda/launch.h"
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

// ---- memory of the host, which the device accesses
// ----------------------------------------------- While protection is on, it can be accessed only
// while a kernel runs: a step's own code that touches it is a fault. Tests switch it on by ctypes.
namespace {

std::map<void*, size_t> locked_pages;
bool is_protected = false;

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

extern "C" void host_cuda_protect(int on) {
  torchopt_ext::is_protected = on != 0;
  torchopt_ext::allow(on == 0);
}

// Begins a capture, ends it, or destroys the graph.
extern "C" void host_cuda_capture(int on) { torchopt_ext::is_captured = on != 0; }
extern "C" void host_cuda_destroy_graph() { torchopt_ext::kept_by_graph.clear(); }

namespace torchopt_ext {

// ---- launches ---------------------------------------------------------------------------------
// Checks the launch as CUDA does. A GPU's arithmetic does not follow the host's rounding mode.
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, cudaStream_t stream) {
  TORCH_INTERNAL_ASSERT(blocks > 0 && blocks <= INT32_MAX, "a grid of ", blocks, " blocks");
  TORCH_INTERNAL_ASSERT(stream == c10::cuda::CUDAStream{}, "not the current stream");
  const FloatMode mode;
  if (is_protected) {
    allow(true);
  }
  run_on_host(kernel, blocks);
  if (is_protected) {
    allow(false);
  }
}

}  // namespace torchopt_ext

#include "cuda/pass_b.cu"
#include "cuda/passes.cu"
#include "cuda/traced.cu"

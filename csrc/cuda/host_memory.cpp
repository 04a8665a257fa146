#include "cuda/host_memory.h"

#include <ATen/Parallel.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <limits>
#include <string>

#include "cuda/device_table.h"

namespace torchopt_ext {
namespace {

// Returns the NUMA node of the current GPU, or -1. By its PCI bus: CUDA_VISIBLE_DEVICES changes
// indices (pytorch#160420).
int numa_node(int device) {
  std::array<char, 32> bus{};
  if (cudaDeviceGetPCIBusId(bus.data(), bus.size(), device) != cudaSuccess) {
    return -1;
  }
  std::string name = bus.data();
  std::ranges::transform(name, name.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  file >> node;
  return file ? node : -1;
}

// Makes the kernel prefer a node for pages that are not there yet.
void prefer_node(void* memory, size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of numaif.h, which libnuma brings
  constexpr int kBits = std::numeric_limits<unsigned long>::digits;
  if (node >= 0 && node < kBits) {
    const unsigned long nodes = 1UL << node;
    syscall(SYS_mbind, memory, bytes, kPreferred, &nodes, kBits + 1, 0);
  }
}

// Touches all pages, on all threads: the kernel zeroes them, at several GB/s a thread.
void take_pages(char* memory, size_t bytes) {
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  constexpr int64_t kPagesPerThread = 1 << 12;
  at::parallel_for(0, (static_cast<int64_t>(bytes) + page - 1) / page, kPagesPerThread,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       static_cast<volatile char*>(memory)[i * page] = 0;
                     }
                   });
}

// Returns the bytes that this process can take, as far as the system and its control group say.
// Beyond them the system ends processes instead of failing.
uint64_t available_bytes() {
  constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();
  uint64_t available = kUnknown;
  std::ifstream file("/proc/meminfo");
  std::string name;
  for (uint64_t kibibytes = 0; file >> name >> kibibytes; std::getline(file, name)) {
    if (name == "MemAvailable:") {
      available = kibibytes << 10;
    }
  }
  std::ifstream most_file("/sys/fs/cgroup/memory.max");
  std::ifstream now_file("/sys/fs/cgroup/memory.current");
  uint64_t most = 0;
  uint64_t now = 0;
  if (most_file >> most && now_file >> now) {  // "max" is no number
    available = std::min(available, most > now ? most - now : 0);
  }
  return available;
}

std::string most_locked() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

void lock_pages(void* memory, size_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  free_released();  // memory that is available again
  const uint64_t available = available_bytes();
  cudaError_t error = cudaErrorMemoryAllocation;
  if (bytes <= available) {
    prefer_node(memory, bytes, numa_node(device.index()));
    take_pages(static_cast<char*>(memory), bytes);
    error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  }
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the next kernel would report it
    TORCH_CHECK(false, "cannot lock ", bytes, " bytes of host memory for the state of ", device,
                " (", cudaGetErrorString(error), "): ", available,
                " bytes are available, the limit of locked memory (ulimit -l) is ", most_locked(),
                ". Under WSL2 Windows limits it. Use state_device=None or a smaller "
                "state_fraction");
  }
  void* address = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&address, memory, 0);
  if (mapped != cudaSuccess || address != memory) {
    static_cast<void>(cudaGetLastError());
    cudaHostUnregister(memory);
    TORCH_CHECK(false, device, " does not access host memory at the host's addresses, which ",
                "state_device='cpu' needs");
  }
}

bool unlock_pages(void* memory, size_t, c10::Device device) {
  int before = 0;
  // Waiting would end a capture. At the end of the process the driver has gone: nothing can be
  // done.
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None ||
      cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device.index()) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  const bool done =
      cudaDeviceSynchronize() == cudaSuccess && cudaHostUnregister(memory) == cudaSuccess;
  static_cast<void>(cudaSetDevice(before));
  static_cast<void>(cudaGetLastError());
  return done;
}

}  // namespace torchopt_ext

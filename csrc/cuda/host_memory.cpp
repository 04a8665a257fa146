#include "cuda/host_memory.h"

#include <ATen/Parallel.h>
#include <c10/cuda/CUDAException.h>
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

std::string available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with("MemAvailable:")) {
      return line;
    }
  }
  return "MemAvailable is unknown";
}

std::string most_locked() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

void lock_pages(void* memory, size_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  prefer_node(memory, bytes, numa_node(device.index()));
  take_pages(static_cast<char*>(memory), bytes);
  const cudaError_t error =
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the next kernel would report it
    TORCH_CHECK(false, "cannot lock ", bytes, " bytes of host memory for the state of ", device,
                " (", cudaGetErrorString(error), "); ", available_memory(),
                ", limit of locked memory (ulimit -l): ", most_locked(),
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

void unlock_pages(void* memory, size_t, c10::Device device) {
  // At the end of the process the driver has gone: there is nothing to wait for.
  int before = 0;
  if (cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device.index()) == cudaSuccess) {
    static_cast<void>(cudaDeviceSynchronize());
    static_cast<void>(cudaHostUnregister(memory));
    static_cast<void>(cudaSetDevice(before));
  }
  static_cast<void>(cudaGetLastError());
}

}  // namespace torchopt_ext

#include "work/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "work/passes.h"

namespace torchopt_ext {
namespace {

struct HostBlock {
  char* memory;
  size_t bytes;
  c10::Device device;
};

// Ends of the blocks by their beginnings.
struct HostBlocks {
  std::mutex mutex;
  std::map<const char*, const char*, std::less<>> ends;
};

HostBlocks& host_blocks() {
  static auto& all = *new HostBlocks();  // leaked: memory may be freed after static objects
  return all;
}

void release_host_block(void* context) {
  const std::unique_ptr<HostBlock> block(static_cast<HostBlock*>(context));
  {
    const std::scoped_lock lock(host_blocks().mutex);
    host_blocks().ends.erase(block->memory);
  }
  if (passes_on(block->device).unlock_pages(block->memory, block->bytes, block->device)) {
    munmap(block->memory, block->bytes);
  }
}

}  // namespace

c10::DataPtr allocate_host_memory(int64_t bytes, c10::Device device) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "the host has no ", bytes,
                   " bytes of memory for the state of ", device);
  madvise(memory, size, MADV_HUGEPAGE);
  // A fork, such as a data loader's, would make the next write move a page away from the device.
  madvise(memory, size, MADV_DONTFORK);
  try {
    passes_on(device).lock_pages(memory, size, device);
  } catch (...) {
    munmap(memory, size);
    throw;
  }
  auto* const begin = static_cast<char*>(memory);
  const std::scoped_lock lock(host_blocks().mutex);
  host_blocks().ends.emplace(begin, begin + size);
  return {memory, new HostBlock{begin, size, device}, release_host_block, at::kCPU};
}

bool is_host_memory(const void* address) {
  const std::scoped_lock lock(host_blocks().mutex);
  const auto after = host_blocks().ends.upper_bound(static_cast<const char*>(address));
  return after != host_blocks().ends.begin() && address < std::prev(after)->second;
}

}  // namespace torchopt_ext

#include "work/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "work/passes.h"

namespace torchopt_ext {
namespace {

// One allocation. The tensors in it share it, and captured graphs that use it.
struct HostBlock {
  char* memory;
  size_t bytes;
  c10::Device device;
};

// The blocks by their beginnings.
struct HostBlocks {
  std::mutex mutex;
  std::map<const char*, std::weak_ptr<HostBlock>, std::less<>> blocks;
};

HostBlocks& host_blocks() {
  static auto& all = *new HostBlocks();  // leaked: memory may be freed after static objects
  return all;
}

void free_block(HostBlock* freed) {
  const std::unique_ptr<HostBlock> block(freed);
  {
    const std::scoped_lock lock(host_blocks().mutex);
    host_blocks().blocks.erase(block->memory);
  }
  if (passes_on(block->device).unlock_pages(block->memory, block->bytes, block->device)) {
    munmap(block->memory, block->bytes);
  }
}

void drop_reference(void* context) { delete static_cast<std::shared_ptr<HostBlock>*>(context); }

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
  std::shared_ptr<HostBlock> block(new HostBlock{begin, size, device}, free_block);
  {
    const std::scoped_lock lock(host_blocks().mutex);
    host_blocks().blocks.emplace(begin, block);
  }
  return {memory, new std::shared_ptr<HostBlock>(std::move(block)), drop_reference, at::kCPU};
}

std::shared_ptr<void> host_block_at(const void* address) {
  std::shared_ptr<HostBlock> block;  // freed after the lock, which freeing takes
  {
    const std::scoped_lock lock(host_blocks().mutex);
    const auto after = host_blocks().blocks.upper_bound(static_cast<const char*>(address));
    if (after != host_blocks().blocks.begin()) {
      block = std::prev(after)->second.lock();
    }
  }
  return block != nullptr && address < block->memory + block->bytes ? block : nullptr;
}

bool is_host_memory(const void* address) { return host_block_at(address) != nullptr; }

}  // namespace torchopt_ext

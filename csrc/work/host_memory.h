// Page-locked memory of the host, in which the state of parameters on a GPU may lie: kernels read
// and write it through the link, at its host address.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace torchopt_ext {

// Returns exactly `bytes` of zeros, in pages that kernels of the device can access. torch's
// allocator of pinned memory rounds sizes up to powers of two (pytorch#95823). Raises, with nothing
// allocated, if the host has no memory left or does not let the pages be locked.
c10::DataPtr allocate_host_memory(int64_t bytes, c10::Device device);

// Whether an address is in such memory.
bool is_host_memory(const void* address);

// Returns the allocation that an address is in, or null. It keeps the memory.
std::shared_ptr<void> host_block_at(const void* address);

}  // namespace torchopt_ext

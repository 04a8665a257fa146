// Locks pages of the host's memory, so that kernels can access them.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace torchopt_ext {

// Takes pages on the GPU's NUMA node and locks them. They must not have been touched before.
void lock_pages(void* memory, size_t bytes, c10::Device device);
// Waits for the device first: its kernels may still use the pages. Returns false if it cannot wait.
bool unlock_pages(void* memory, size_t bytes, c10::Device device);

}  // namespace torchopt_ext

// Counts what the process allocates while counting is on. The library is preloaded, and replaces
// malloc and the related functions by glibc's __libc_ functions with a count around them.
//
// Sizes are the usable bytes of the blocks that malloc returned.
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

// glibc's own declarations have attributes that are not needed here.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> calls{0};
std::atomic<int64_t> live{0};
std::atomic<int64_t> peak{0};

void add(int64_t bytes) {
  const int64_t now = live.fetch_add(bytes) + bytes;
  int64_t seen = peak.load();
  while (now > seen && !peak.compare_exchange_weak(seen, now)) {
  }
}

void* counted(void* block) {
  if (block != nullptr && counting.load()) {
    calls.fetch_add(1);
    add(static_cast<int64_t>(malloc_usable_size(block)));
  }
  return block;
}

void forget(void* block) {
  if (block != nullptr && counting.load()) live.fetch_sub(malloc_usable_size(block));
}

}  // namespace

extern "C" {

void* malloc(size_t size) { return counted(__libc_malloc(size)); }

void* calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }

void* realloc(void* block, size_t size) {
  forget(block);
  return counted(__libc_realloc(block, size));
}

void* memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** block, size_t alignment, size_t size) {
  *block = memalign(alignment, size);
  return *block == nullptr ? ENOMEM : 0;
}

void free(void* block) {
  forget(block);
  __libc_free(block);
}

// Starts counting.
void allocations_start() {
  calls = 0;
  live = 0;
  peak = 0;
  counting = true;
}

// Stops counting. Returns the allocations since the start, and the peak above what was held then.
void allocations_stop(int64_t* count, int64_t* bytes) {
  counting = false;
  *count = calls;
  *bytes = peak;
}

}  // extern "C"

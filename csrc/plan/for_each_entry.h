// Loops over a step plan's entries, each of which touches a few cache lines.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

namespace torchopt_ext {

// One thread loops over up to kFewEntries entries: it ends before other threads are awake. For
// more, all threads wake (ATen/ParallelOpenMP.h), and one thread per kEntriesPerThread gets work.
inline constexpr size_t kFewEntries = 512;
inline constexpr size_t kEntriesPerThread = 128;
// With fewer threads, the calling thread loops over entries, too, when it has something else to do.
inline constexpr size_t kThreadsBeside = 4;
// How many entries ahead memory is prefetched.
inline constexpr size_t kEntriesAhead = 8;

// Calls body(begin, end) on ranges of entries in parallel. The same thread gets the same entries
// each time, so that its caches hold what it wrote to the entries before.
template <class Body>
void for_each_entry(size_t entries, const Body& body) {
  const size_t each = entries <= kFewEntries ? kFewEntries : kEntriesPerThread;
  at::parallel_for(0, static_cast<int64_t>(entries), static_cast<int64_t>(each),
                   [&](int64_t begin, int64_t end) {
                     body(static_cast<size_t>(begin), static_cast<size_t>(end));
                   });
}

// Calls beside() on the calling thread, and body as above: meanwhile, if there are enough threads.
template <class Body, class Beside>
void for_each_entry_beside(size_t entries, const Body& body, const Beside& beside) {
  const auto threads = static_cast<size_t>(at::get_num_threads());
  if (entries <= kFewEntries || threads < kThreadsBeside) {
    beside();
    for_each_entry(entries, body);
    return;
  }
  const size_t others = std::min(threads - 1, (entries - 1) / kEntriesPerThread + 1);
  // The calling thread runs the first iteration first, whatever the number of threads.
  at::parallel_for(0, static_cast<int64_t>(others) + 1, 1, [&](int64_t first, int64_t last) {
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
      if (i == 0) {
        beside();
      } else {
        body((i - 1) * entries / others, i * entries / others);
      }
    }
  });
}

// Calls before() on the calling thread, then body as above. Meanwhile other threads wake up and
// call prefetch on their ranges. If before() raises, body is not called.
template <class Body, class Before, class Prefetch>
void for_each_entry_after(size_t entries, const Before& before, const Prefetch& prefetch,
                          const Body& body) {
  enum : uint8_t { kPending, kDone, kFailed };
  std::atomic<uint8_t> progress = kPending;
  const auto run = [&] {
    try {
      before();
    } catch (...) {
      progress.store(kFailed, std::memory_order_release);
      throw;
    }
    progress.store(kDone, std::memory_order_release);
  };
  const auto wait = [&](size_t begin, size_t end) {
    prefetch(begin, end);
    while (progress.load(std::memory_order_acquire) == kPending) {
      std::this_thread::yield();
    }
    if (progress.load(std::memory_order_acquire) == kDone) {
      body(begin, end);
    }
  };
  for_each_entry_beside(entries, wait, run);
}

}  // namespace torchopt_ext

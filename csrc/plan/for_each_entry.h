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

// Lets time pass in the `round`-th iteration of a loop that waits for another thread. A pause leaves
// execution units to the core's other thread, and a yield the core to a thread that waits for it.
inline void relax(int round) {
#ifdef __x86_64__
  if (round % 64 != 0) {
    __builtin_ia32_pause();
    return;
  }
#endif
  std::this_thread::yield();
}

// Calls first() on the calling thread, and meanwhile on ranges as above; then `after` on the same
// ranges, unless first() raised.
template <class First, class Meanwhile, class After>
void for_each_entry_after(size_t entries, const First& first, const Meanwhile& meanwhile,
                          const After& after) {
  enum : uint8_t { kPending, kDone, kFailed };
  std::atomic<uint8_t> progress = kPending;
  const auto run = [&] {
    try {
      first();
    } catch (...) {
      progress.store(kFailed, std::memory_order_release);
      throw;
    }
    progress.store(kDone, std::memory_order_release);
  };
  const auto wait = [&](size_t begin, size_t end) {
    meanwhile(begin, end);
    for (int round = 1; progress.load(std::memory_order_acquire) == kPending; ++round) {
      relax(round);
    }
    if (progress.load(std::memory_order_acquire) == kDone) {
      after(begin, end);
    }
  };
  for_each_entry_beside(entries, wait, run);
}

// Leaves the cache line of an equal value shared: the thread that runs the passes reads what other
// threads have written.
template <class T, class Value>
void set_if_other(T& value, Value other) {
  if (value != other) {
    value = other;
  }
}

}  // namespace torchopt_ext

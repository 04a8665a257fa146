// Loops over a step plan's entries, each of which touches a few cache lines.
#pragma once

#include <ATen/Parallel.h>

namespace torchopt_ext {

// One thread loops over up to kFewEntries entries: it ends before other threads are awake. For
// more, all threads wake (ATen/ParallelOpenMP.h), and one thread per kEntriesPerThread gets work.
inline constexpr size_t kFewEntries = 512;
inline constexpr size_t kEntriesPerThread = 128;
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

}  // namespace torchopt_ext

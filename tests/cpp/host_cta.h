// The block of threads and the warp of cuda/cta.h as loops over threads, which run the bodies of
// CUDA kernels on the host.
#pragma once

#include <cstdint>

#include "cuda/cta.h"

namespace torchopt_ext {

// Calls f(0) to f(n - 1) from either end: a body may not depend on the order of a phase's threads.
template <class F>
void in_some_order(int n, const F& f) {
  static thread_local uint32_t draw = 0;
  draw = draw * 1664525 + 1013904223;
  const bool reversed = draw >> 31 != 0;
  for (int i = 0; i < n; ++i) {
    f(reversed ? n - 1 - i : i);
  }
}

struct HostWarp {
  template <class T>
  struct PerThread {
    T value[kWarpThreads];
    T& operator[](int thread) { return value[thread]; }
  };
  template <class F>
  void each(const F& f) const {
    in_some_order(kWarpThreads, f);
  }
  template <class F>
  void in_turn(const F& f) const {
    each(f);
  }
  template <class F>
  void leader(const F& f) const {
    f();
  }
  template <class T>
  void fold(PerThread<T>& values, int distance) const {
    for (int thread = 0; thread < kWarpThreads; ++thread) {
      if ((thread & distance) == 0) {
        values[thread] = values[thread + distance] += values[thread];
      }
    }
  }
  template <class T>
  void fold_pair(PerThread<T>& a, const PerThread<T>& b, int distance) const {
    for (int thread = 0; thread < kWarpThreads; ++thread) {
      if ((thread & distance) == 0) {
        a[thread] += a[thread + distance];
        a[thread + distance] = b.value[thread] + b.value[thread + distance];
      }
    }
  }
  void exchange(PerThread<uint32_t>& a, PerThread<uint32_t>& b, int distance) const {
    for (int thread = 0; thread < kWarpThreads; ++thread) {
      if ((thread & distance) == 0) {
        const uint32_t kept = b[thread];
        b[thread] = a[thread + distance];
        a[thread + distance] = kept;
      }
    }
  }
  void shift(PerThread<int64_t>& values) const {
    for (int thread = kWarpThreads - 1; thread > 0; --thread) {
      values[thread] = values[thread - 1];
    }
    values[0] = 0;
  }
  static void max_of_neighbors(PerThread<uint32_t>& values, int count) {
    for (int first = 0; first < kWarpThreads; first += count) {
      uint32_t most = 0;
      for (int thread = first; thread < first + count; ++thread) {
        most = values[thread] > most ? values[thread] : most;
      }
      for (int thread = first; thread < first + count; ++thread) {
        values[thread] = most;
      }
    }
  }
};

struct HostCta {
  int64_t block;
  int64_t blocks;
  int threads;

  template <class F>
  void each(const F& f) const {
    in_some_order(threads, f);
  }
  template <class F>
  void each_warp(const F& f) const {
    in_some_order(threads / kWarpThreads, [&](int warp) { f(warp, HostWarp{}); });
  }
  static void add(int64_t* where, int64_t change) {  // wraps, as on a GPU
    *where = static_cast<int64_t>(static_cast<uint64_t>(*where) + static_cast<uint64_t>(change));
  }
};

// Runs a kernel block by block.
template <class Kernel>
void run_on_host(const Kernel& kernel, int64_t blocks, int threads = Kernel::kThreads) {
  for (int64_t block = 0; block < blocks; ++block) {
    const HostCta cta{block, blocks, threads};
    if constexpr (requires { typename Kernel::Shared; }) {
      typename Kernel::Shared shared;
      kernel(cta, shared);
    } else {
      kernel(cta);
    }
  }
}

}  // namespace torchopt_ext

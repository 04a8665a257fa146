// A block of CUDA threads, as the kernel bodies see it, twice: the real one, and one that runs on
// the host through loops over threads. A body is a sequence of phases; every thread finishes a
// phase before any starts the next. So the host can run the very code the GPU runs and must give
// the same bits.
#pragma once

#include "kernels/adam.h"
#include "kernels/control.h"
#include "kernels/trace.h"
#include "work/work_list.h"

namespace torchopt_ext {

inline constexpr int kWarpThreads = 32;
inline constexpr int kMaxWarps = 32;

// What the threads of a block share.
struct CtaShared {
  ExactAccumulator accumulator;
  ChunkTrace chunk;
  ChunkTrace tile[kMaxWarps];
};

// 32 threads that run in step. A PerThread holds a value for each of them.
struct HostWarp {
  template <class T>
  struct PerThread {
    T value[kWarpThreads];
    T& operator[](int thread) { return value[thread]; }
  };
  template <class F>
  void each(const F& f) const {
    for (int thread = 0; thread < kWarpThreads; ++thread) {
      f(thread);
    }
  }
  template <class F>
  void leader(const F& f) const {
    f();
  }
  // Thread t += thread t + distance, for t below distance.
  template <class T>
  void fold(PerThread<T>& values, int distance) const {
    for (int thread = 0; thread < distance; ++thread) {
      values[thread] += values[thread + distance];
    }
  }
  static uint32_t max(PerThread<uint32_t>& values) {
    uint32_t most = 0;
    for (const uint32_t value : values.value) {
      most = value > most ? value : most;
    }
    return most;
  }
};

// Block `block` of a grid of `blocks`.
struct HostCta {
  int64_t block;
  int64_t blocks;
  int threads;
  CtaShared memory{};

  HostCta(int64_t block_index, int64_t block_count, int thread_count)
      : block(block_index), blocks(block_count), threads(thread_count) {}
  CtaShared& shared() { return memory; }
  template <class F>
  void each(const F& f) {
    for (int thread = 0; thread < threads; ++thread) {
      f(thread);
    }
  }
  template <class F>
  void each_warp(const F& f) {
    for (int warp = 0; warp < threads / kWarpThreads; ++warp) {
      f(warp, HostWarp{});
    }
  }
  static void add(int64_t* where, int64_t change) { *where += change; }
};

#ifdef __CUDACC__

struct DeviceWarp {
  template <class T>
  struct PerThread {
    T value;
    __device__ T& operator[](int) { return value; }
  };
  template <class F>
  __device__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x) % kWarpThreads);
  }
  template <class F>
  __device__ void leader(const F& f) const {
    if (threadIdx.x % kWarpThreads == 0) {
      f();
    }
  }
  __device__ void fold(PerThread<double>& values, int distance) const {
    values.value = __dadd_rn(values.value, __shfl_xor_sync(0xffffffffu, values.value, distance));
  }
  template <class T>
  __device__ void fold(PerThread<T>& values, int distance) const {
    values.value += __shfl_xor_sync(0xffffffffu, values.value, distance);
  }
  __device__ static uint32_t max(const PerThread<uint32_t>& values) {
    uint32_t most = values.value;
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, most, distance);
      most = other > most ? other : most;
    }
    return most;
  }
};

struct DeviceCta {
  int64_t block;
  int64_t blocks;
  int threads;
  CtaShared& memory;

  __device__ explicit DeviceCta(CtaShared& shared_memory)
      : block(blockIdx.x),
        blocks(gridDim.x),
        threads(static_cast<int>(blockDim.x)),
        memory(shared_memory) {}
  __device__ CtaShared& shared() { return memory; }
  template <class F>
  __device__ void each(const F& f) {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class F>
  __device__ void each_warp(const F& f) {
    f(static_cast<int>(threadIdx.x) / kWarpThreads, DeviceWarp{});
    __syncthreads();
  }
  __device__ static void add(int64_t* where, int64_t change) {
    atomicAdd(reinterpret_cast<unsigned long long*>(where),
              static_cast<unsigned long long>(change));
  }
};

#endif

}  // namespace torchopt_ext

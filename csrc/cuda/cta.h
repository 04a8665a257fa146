// A block of CUDA threads and its warps as the kernel bodies see them. A body is a sequence of
// phases: every thread finishes a phase before any thread starts the next. Loops over threads
// (tests/cpp/host_cta.h) can therefore run a body on the host and must give the same bits.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

struct CUstream_st;  // cudaStream_t points to one

namespace torchopt_ext {

inline constexpr int kWarpThreads = 32;

#ifdef __CUDACC__

// The 32 threads of a warp. All finish a call of each() before the next begins. A PerThread holds a
// value for each thread.
struct DeviceWarp {
  static constexpr unsigned kAll = 0xffffffffu;

  template <class T>
  struct PerThread {
    T value;
    __device__ T& operator[](int) { return value; }
  };
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kWarpThreads; }
  template <class F>
  __device__ void each(const F& f) const {
    f(thread());
    __syncwarp();
  }
  // Runs f for one thread after another, so that threads may write to the same memory.
  template <class F>
  __device__ void in_turn(const F& f) const {
    for (int turn = 0; turn < kWarpThreads; ++turn) {
      if (thread() == turn) {
        f(turn);
      }
      __syncwarp();
    }
  }
  template <class F>
  __device__ void leader(const F& f) const {
    if (thread() == 0) {
      f();
    }
    __syncwarp();
  }
  // For each pair of threads whose numbers differ in bit `distance`: both values become their sum.
  template <class T>
  __device__ void fold(PerThread<T>& values, int distance) const {
    values.value += __shfl_xor_sync(kAll, values.value, distance);
  }
  // For each such pair: the lower thread's `a` becomes the sum of both `a`, the upper thread's `a`
  // the sum of both `b`. The two threads share the work.
  template <class T>
  __device__ void fold_pair(PerThread<T>& a, const PerThread<T>& b, int distance) const {
    const bool upper = (thread() & distance) != 0;
    const T other = __shfl_xor_sync(kAll, upper ? a.value : b.value, distance);
    a.value = (upper ? b.value : a.value) + other;
  }
  // For each such pair: swaps the lower thread's `b` and the upper thread's `a`.
  __device__ void exchange(PerThread<uint32_t>& a, PerThread<uint32_t>& b, int distance) const {
    const bool upper = (thread() & distance) != 0;
    const uint32_t other = __shfl_xor_sync(kAll, upper ? a.value : b.value, distance);
    (upper ? a : b).value = other;
  }
  // Gives each thread the value of the thread before, and the first thread 0.
  __device__ void shift(PerThread<int64_t>& values) const {
    const int64_t before = __shfl_up_sync(kAll, values.value, 1);
    values.value = thread() == 0 ? 0 : before;
  }
  // Gives each thread the largest value in its group of `count` neighboring threads.
  __device__ static void max_of_neighbors(PerThread<uint32_t>& values, int count) {
    for (int distance = count / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAll, values.value, distance);
      values.value = other > values.value ? other : values.value;
    }
  }
};

// Block `block` of a grid of `blocks`.
struct DeviceCta {
  int64_t block = blockIdx.x;
  int64_t blocks = gridDim.x;
  int threads = static_cast<int>(blockDim.x);

  template <class F>
  __device__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  // Always inlined: a call would move a phase's values from registers to memory.
  template <class F>
  __device__ __forceinline__ void each_warp(const F& f) const {
    f(static_cast<int>(threadIdx.x) / kWarpThreads, DeviceWarp{});
    __syncthreads();
  }
  __device__ static void add(int64_t* where, int64_t change) {
    atomicAdd(reinterpret_cast<unsigned long long*>(where),
              static_cast<unsigned long long>(change));
  }
};

#endif

namespace {

// Returns the largest value to every thread.
template <class Warp>
TORCHOPT_HD inline uint32_t warp_max(typename Warp::template PerThread<uint32_t> values) {
  Warp::max_of_neighbors(values, kWarpThreads);
  return values[0];
}

}  // namespace
}  // namespace torchopt_ext

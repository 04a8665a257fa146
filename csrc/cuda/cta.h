// A block of CUDA threads, as the kernel bodies see it (bodies.h), twice: the real one, and one
// that runs on the host through loops over threads. A body is a sequence of phases; every thread
// finishes a phase before any starts the next. So the host can run the very code the GPU runs and
// must give the same bits.
#pragma once

#include "kernels/adam.h"
#include "kernels/control.h"

namespace torchopt_ext {

inline constexpr int kWarpThreads = 32;

// What the threads of a block share.
struct CtaShared {
  ExactAccumulator accumulator;
  AdamScalars<float> as_float;
  AdamScalars<double> as_double;
};

// 32 threads that run in step. Doubles holds one double for each of them.
struct HostWarp {
  struct Doubles {
    double value[kWarpThreads];
    double& operator[](int thread) { return value[thread]; }
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
  void fold(Doubles& doubles, int distance) const {
    for (int thread = 0; thread < distance; ++thread) {
      doubles[thread] += doubles[thread + distance];
    }
  }
};

struct HostCta {
  int64_t block;
  int threads;
  CtaShared memory{};

  HostCta(int64_t block_index, int thread_count) : block(block_index), threads(thread_count) {}
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
  struct Doubles {
    double value;
    __device__ double& operator[](int) { return value; }
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
  __device__ void fold(Doubles& doubles, int distance) const {
    doubles.value = __dadd_rn(doubles.value, __shfl_xor_sync(0xffffffffu, doubles.value, distance));
  }
};

struct DeviceCta {
  int64_t block;
  int threads;
  CtaShared& memory;

  __device__ explicit DeviceCta(CtaShared& shared_memory)
      : block(blockIdx.x), threads(static_cast<int>(blockDim.x)), memory(shared_memory) {}
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

// Stands in for torch's header where the host is the device: there is one stream.
#pragma once

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace c10::cuda {

struct CUDAStream {
  operator cudaStream_t() const { return reinterpret_cast<cudaStream_t>(&stream); }
  static inline char stream = 0;  // only its address matters
};

}  // namespace c10::cuda

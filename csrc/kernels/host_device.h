// Marks a function that runs on the host and inside CUDA kernels. The headers of this folder are
// free of torch and of the C++ library's inline code, and keep their functions in an anonymous
// namespace: they are compiled once per instruction set, and a copy that the linker shared between
// those builds could run AVX-512 code on a machine without it (aten/src/ATen/native/cpu/README.md).
#pragma once

#ifdef __CUDACC__
#define TORCHOPT_HD __host__ __device__
#else
#define TORCHOPT_HD
#endif

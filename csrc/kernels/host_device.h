// Marks a function for the host and for CUDA kernels. The headers of this folder use neither torch
// nor inline code of the C++ library, and keep their functions in an anonymous namespace: they are
// compiled once per instruction set, and a copy that the linker shared between the builds could run
// AVX-512 code on a machine without AVX-512 (aten/src/ATen/native/cpu/README.md).
#pragma once

#ifdef __CUDACC__
#define TORCHOPT_HD __host__ __device__
#else
#define TORCHOPT_HD
#endif

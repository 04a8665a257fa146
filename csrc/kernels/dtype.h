// Element types of parameters, gradients and optimizer state, and conversion between them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "kernels/host_device.h"

namespace torchopt_ext {

// Only moments use kInt8: 8-bit codes (quantize.h).
enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt8 };
inline constexpr int kDTypes = 4;  // the types of parameters and gradients

// 16-bit storage types; arithmetic happens in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

namespace {

TORCHOPT_HD constexpr int64_t element_size(DType dtype) {
  constexpr int kBytesByDType = 0x12284;  // 4 bits a type: branches would take registers
  return kBytesByDType >> 4 * static_cast<int>(dtype) & 0xf;
}
static_assert(element_size(DType::kFloat32) == 4 && element_size(DType::kFloat64) == 8 &&
              element_size(DType::kBFloat16) == 2 && element_size(DType::kFloat16) == 2 &&
              element_size(DType::kInt8) == 1);

template <class To, class From>
TORCHOPT_HD inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

TORCHOPT_HD inline float widen(float x) { return x; }
TORCHOPT_HD inline double widen(double x) { return x; }
TORCHOPT_HD inline float widen(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
TORCHOPT_HD inline float widen(Float16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude >= 0x400u) {
    return bit_cast<float>(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  }
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return bit_cast<float>(sign | bit_cast<uint32_t>(subnormal));
#endif
}

// Rounds to nearest even. A NaN argument must be 0x7fc00000, the canonical form.
template <class T>
TORCHOPT_HD T narrow(float x);
template <>
TORCHOPT_HD inline float narrow<float>(float x) {
  return x;
}
template <>
TORCHOPT_HD inline BFloat16 narrow<BFloat16>(float x) {
  const auto bits = bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
TORCHOPT_HD inline Float16 narrow<Float16>(float x) {
#ifdef __CUDA_ARCH__
  return {x == x ? __half_as_ushort(__float2half_rn(x)) : static_cast<uint16_t>(0x7e00u)};
#else
  const auto bits = bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x47800000u) {  // 65536 and above; 65520 and above carry into infinity below
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude >= 0x38800000u) {  // normal in fp16
    const uint32_t rebased = magnitude - ((127u - 15u) << 23);
    return {static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13))};
  }
  // Subnormal in fp16: adding 0.5 aligns the last fp16 bit with the last bit of the sum, so the
  // addition itself rounds to nearest even.
  const float aligned = bit_cast<float>(magnitude) + 0.5f;
  return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(aligned) - 0x3f000000u))};
#endif
}

// Returns a number of type kFloat32 or kFloat64.
TORCHOPT_HD inline double read_number(const void* x, DType dtype) {
  return dtype == DType::kFloat64 ? *static_cast<const double*>(x)
                                  : static_cast<double>(*static_cast<const float*>(x));
}

}  // namespace
}  // namespace torchopt_ext

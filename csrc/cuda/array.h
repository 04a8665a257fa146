// An array of a tensor as a CUDA thread accesses it: a group of elements at once where addresses
// allow it (vector_range.h), first as bits and then as numbers, so that a thread can have the loads
// of several arrays under way before it waits for any.
#pragma once

#include "cuda/vector_range.h"
#include "kernels/dtype.h"

namespace torchopt_ext {

struct DeviceArray {
  void* memory;  // null: there is none
  int32_t size;  // bytes of an element: 2, 4 or 8
  bool aligned;  // groups are; of groups of one it does not matter
};

// The bits of Width elements of at most sizeof(T) bytes each, those of two bytes packed.
template <class T, int Width>
struct Bits {
  uint32_t word[Width * sizeof(T) / sizeof(uint32_t)];
};

namespace {

TORCHOPT_HD inline DeviceArray array_of(void* memory, int64_t size) {
  return {memory, static_cast<int32_t>(size), true};
}

TORCHOPT_HD inline uint64_t address_of(const DeviceArray& array, int64_t i) {
  return reinterpret_cast<uint64_t>(array.memory) + static_cast<uint64_t>(i * array.size);
}

// The builtins become single accesses of all the bytes.
template <int Bytes>
TORCHOPT_HD inline void load_bytes(void* to, const void* from) {
  __builtin_memcpy(to, __builtin_assume_aligned(from, Bytes), Bytes);
}
template <int Bytes>
TORCHOPT_HD inline void store_bytes(void* to, const void* from) {
  __builtin_memcpy(__builtin_assume_aligned(to, Bytes), from, Bytes);
}

template <int Size, int Width>
TORCHOPT_HD inline void load_elements(void* to, const DeviceArray& array, int64_t i) {
  const char* from = static_cast<const char*>(array.memory) + i * Size;
  if (array.aligned) {
    constexpr int kBytes = Size * Width;
    constexpr int kAccess = kBytes < 16 ? kBytes : 16;
    for (int b = 0; b < kBytes; b += kAccess) {
      load_bytes<kAccess>(static_cast<char*>(to) + b, from + b);
    }
  } else {
    for (int k = 0; k < Width; ++k) {
      load_bytes<Size>(static_cast<char*>(to) + k * Size, from + k * Size);
    }
  }
}

template <int Size, int Width>
TORCHOPT_HD inline void store_elements(const DeviceArray& array, int64_t i, const void* from) {
  char* to = static_cast<char*>(array.memory) + i * Size;
  if (array.aligned) {
    constexpr int kBytes = Size * Width;
    constexpr int kAccess = kBytes < 16 ? kBytes : 16;
    for (int b = 0; b < kBytes; b += kAccess) {
      store_bytes<kAccess>(to + b, static_cast<const char*>(from) + b);
    }
  } else {
    for (int k = 0; k < Width; ++k) {
      store_bytes<Size>(to + k * Size, static_cast<const char*>(from) + k * Size);
    }
  }
}

// Elements [i, i + Width).
template <class T, int Width>
TORCHOPT_HD inline Bits<T, Width> load(const DeviceArray& array, int64_t i) {
  Bits<T, Width> bits{};
  if constexpr (sizeof(T) == sizeof(double)) {
    load_elements<8, Width>(&bits, array, i);
  } else if (array.size == 2) {
    load_elements<2, Width>(&bits, array, i);
  } else {
    load_elements<4, Width>(&bits, array, i);
  }
  return bits;
}
template <class T, int Width>
TORCHOPT_HD inline void store(const DeviceArray& array, int64_t i, const Bits<T, Width>& bits) {
  if constexpr (sizeof(T) == sizeof(double)) {
    store_elements<8, Width>(array, i, &bits);
  } else if (array.size == 2) {
    store_elements<2, Width>(array, i, &bits);
  } else {
    store_elements<4, Width>(array, i, &bits);
  }
}

// Element k, of 2, 4 or 8 bytes.
template <class T, int Width>
TORCHOPT_HD inline uint16_t half_bits(const Bits<T, Width>& bits, int k) {
  return static_cast<uint16_t>(bits.word[k / 2] >> (16 * (k % 2)));
}
template <class T, int Width>
TORCHOPT_HD inline void set_half_bits(Bits<T, Width>& bits, int k, uint16_t half) {
  bits.word[k / 2] |= static_cast<uint32_t>(half) << (16 * (k % 2));  // starts from zero
}

template <int Width>
TORCHOPT_HD inline void decode(const Bits<float, Width>& bits, DType dtype, float (&x)[Width]) {
  if (dtype == DType::kBFloat16) {
    for (int k = 0; k < Width; ++k) {
      x[k] = widen(BFloat16{half_bits(bits, k)});
    }
  } else if (dtype == DType::kFloat16) {
    for (int k = 0; k < Width; ++k) {
      x[k] = widen(Float16{half_bits(bits, k)});
    }
  } else {
    for (int k = 0; k < Width; ++k) {
      x[k] = bit_cast<float>(bits.word[k]);
    }
  }
}
template <int Width>
TORCHOPT_HD inline void decode(const Bits<double, Width>& bits, DType, double (&x)[Width]) {
  for (int k = 0; k < Width; ++k) {
    x[k] = bit_cast<double>(static_cast<uint64_t>(bits.word[2 * k + 1]) << 32 | bits.word[2 * k]);
  }
}

// Rounded to nearest even.
template <int Width>
TORCHOPT_HD inline Bits<float, Width> encode(const float (&x)[Width], DType dtype) {
  Bits<float, Width> bits{};
  for (int k = 0; k < Width; ++k) {
    if (dtype == DType::kBFloat16) {
      set_half_bits(bits, k, narrow<BFloat16>(x[k]).bits);
    } else if (dtype == DType::kFloat16) {
      set_half_bits(bits, k, narrow<Float16>(x[k]).bits);
    } else {
      bits.word[k] = bit_cast<uint32_t>(x[k]);
    }
  }
  return bits;
}
template <int Width>
TORCHOPT_HD inline Bits<double, Width> encode(const double (&x)[Width], DType) {
  Bits<double, Width> bits{};
  for (int k = 0; k < Width; ++k) {
    const auto pattern = bit_cast<uint64_t>(x[k]);
    bits.word[2 * k] = static_cast<uint32_t>(pattern);
    bits.word[2 * k + 1] = static_cast<uint32_t>(pattern >> 32);
  }
  return bits;
}

}  // namespace
}  // namespace torchopt_ext

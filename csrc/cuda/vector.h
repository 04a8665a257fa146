// A CUDA thread's memory accesses of up to 16 bytes, and where the arrays' alignment allows them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/tensor_work.h"

namespace torchopt_ext {

// The bits of an element of 1, 2, 4 or 8 bytes.
template <int kSize>
using Bits = std::conditional_t<
    kSize == 8, uint64_t,
    std::conditional_t<kSize == 4, uint32_t, std::conditional_t<kSize == 2, uint16_t, uint8_t>>>;

// The bits of neighboring elements, as one access moves them.
template <int kBytes>
struct alignas(kBytes) Packed {
  using Word = Bits<(kBytes < 4 ? kBytes : 4)>;
  Word word[kBytes / sizeof(Word)];
};
using Vector = Packed<16>;

// A number that a generic lambda's parameter carries in its type.
template <int kValue>
struct Constant {
  TORCHOPT_HD constexpr operator int() const { return kValue; }
};

namespace {

// Calls f(0) to f(kCount - 1) without a loop, so that arrays indexed by f stay in registers.
template <int kCount, class F>
TORCHOPT_HD inline void unrolled(const F& f) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(f);
    f(kCount - 1);
  }
}

TORCHOPT_HD inline bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uint64_t>(address) % static_cast<uint64_t>(bytes) == 0;
}

// Ends the program on the host for a misaligned access, as a GPU does.
template <class T>
TORCHOPT_HD inline void check_aligned(const void* address) {
  if (!is_aligned(address, alignof(T))) {
    __builtin_trap();
  }
}
template <class T>
TORCHOPT_HD inline T load_bits(const void* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const T*>(from);
#else
  check_aligned<T>(from);
  T bits;
  __builtin_memcpy(&bits, from, sizeof(T));
  return bits;
#endif
}
template <class T>
TORCHOPT_HD inline void store_bits(void* to, const T& bits) {
#ifdef __CUDA_ARCH__
  *static_cast<T*>(to) = bits;
#else
  check_aligned<T>(to);
  __builtin_memcpy(to, &bits, sizeof(T));
#endif
}

// Returns element k.
template <int kSize, int kBytes>
TORCHOPT_HD inline Bits<kSize> element_of(const Packed<kBytes>& packed, int k) {
  if constexpr (kSize == 8) {
    return static_cast<uint64_t>(packed.word[2 * k + 1]) << 32 | packed.word[2 * k];
  } else if constexpr (kSize == 4) {
    return packed.word[k];
  } else {
    constexpr int kPerWord = 4 / kSize;  // elements in a word
    return static_cast<Bits<kSize>>(packed.word[k / kPerWord] >> (8 * kSize * (k % kPerWord)));
  }
}
// Sets element k of `packed`, which must start as zero.
template <int kSize, int kBytes>
TORCHOPT_HD inline void set_element(Packed<kBytes>& packed, int k, Bits<kSize> bits) {
  if constexpr (kSize == 8) {
    packed.word[2 * k] = static_cast<uint32_t>(bits);
    packed.word[2 * k + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (kSize == 4) {
    packed.word[k] = bits;
  } else {
    constexpr int kPerWord = 4 / kSize;
    packed.word[k / kPerWord] |= static_cast<typename Packed<kBytes>::Word>(
        static_cast<uint32_t>(bits) << (8 * kSize * (k % kPerWord)));
  }
}

// Returns the bytes of one access to part or all of `elements` elements of `size` bytes.
TORCHOPT_HD constexpr int64_t access_bytes(int64_t elements, int64_t size) {
  return elements * size < 16 ? elements * size : 16;
}

// The elements [begin, end) of a chunk that can be accessed as whole, aligned registers.
struct AlignedRange {
  int begin;
  int end;
};

// Returns whether a register of `array` may start at element i.
TORCHOPT_HD inline bool is_aligned_at(const Layout& layout, void* const (&x)[kArrays], int array,
                                      int width, int i) {
  const int64_t size = element_size(layout, array);
  return is_aligned(static_cast<const char*>(x[array]) + i * size, access_bytes(width, size));
}
// Returns whether a register of every array that is not null may start at element i.
TORCHOPT_HD inline bool are_all_aligned_at(const Layout& layout, void* const (&x)[kArrays],
                                           int width, int i) {
  bool aligned = true;
  unrolled<kArrays>([&](int array) {
    aligned = aligned && (x[array] == nullptr || is_aligned_at(layout, x, array, width, i));
  });
  return aligned;
}

// Returns the registers of the first n elements of arrays `x`, from the first element where every
// array is aligned. Returns an empty range if the arrays are aligned differently.
TORCHOPT_HD inline AlignedRange aligned_registers(const Layout& layout, void* const (&x)[kArrays],
                                                  int width, int n) {
  int first = 0;
  while (first < width && !is_aligned_at(layout, x, kParam, width, first)) {
    ++first;
  }
  const bool aligned = first <= n && are_all_aligned_at(layout, x, width, first);
  return aligned ? AlignedRange{first, first + (n - first) / width * width} : AlignedRange{0, 0};
}

// Visits a thread's share of n elements: whole(i) for elements [i, i + width), single(i) for one
// element. Neighboring threads have neighboring registers.
template <class Whole, class Single>
TORCHOPT_HD inline void for_each_register(const AlignedRange& registers, int width, int n,
                                          int thread, int threads, const Whole& whole,
                                          const Single& single) {
  for (int i = registers.begin + thread * width; i < registers.end; i += threads * width) {
    whole(i);
  }
  const int left = registers.begin + (n - registers.end);
  for (int j = thread; j < left; j += threads) {
    single(j < registers.begin ? j : registers.end + (j - registers.begin));
  }
}

}  // namespace
}  // namespace torchopt_ext

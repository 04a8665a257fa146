// Which elements of an array a block of threads accesses several at a time: a group of `width`
// elements is one access where its address is a multiple of its size. A range therefore has a head
// and a tail whose elements are accessed one by one. Where arrays are aligned differently, the head
// is chosen for the most bytes; the other arrays' groups are then accessed one by one, too.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace torchopt_ext {

// Elements [begin, end) are whole groups.
struct VectorRange {
  int64_t begin;
  int64_t end;
};

namespace {

// Whether a group starts at this address; its bytes are a power of two.
TORCHOPT_HD inline bool is_aligned(uint64_t address, int64_t bytes) {
  return (address & (static_cast<uint64_t>(bytes) - 1)) == 0;
}

// `addresses` are those of element `begin` in arrays whose elements have `sizes` bytes; an array of
// size 0 does not count.
template <int Arrays>
TORCHOPT_HD inline VectorRange vector_range(const uint64_t (&addresses)[Arrays],
                                            const int64_t (&sizes)[Arrays], int64_t width,
                                            int64_t begin, int64_t end) {
  int64_t head = 0;
  int64_t most = -1;
  for (int64_t candidate = 0; candidate < width; ++candidate) {
    int64_t bytes = 0;
    for (int a = 0; a < Arrays; ++a) {
      const auto address = addresses[a] + static_cast<uint64_t>(candidate * sizes[a]);
      bytes += sizes[a] > 0 && is_aligned(address, width * sizes[a]) ? sizes[a] : 0;
    }
    if (bytes > most) {
      most = bytes;
      head = candidate;
    }
  }
  if (end - begin < head + width) {
    return {begin, begin};
  }
  return {begin + head, begin + head + (end - begin - head) / width * width};
}

// The share of one of `threads` threads in [begin, end): group(i) for elements [i, i + width),
// single(i) for one element. Neighbouring threads have neighbouring groups.
template <class Group, class Single>
TORCHOPT_HD inline void for_each_access(const VectorRange& range, int64_t width, int64_t begin,
                                        int64_t end, int thread, int threads, const Group& group,
                                        const Single& single) {
  for (int64_t i = range.begin + thread * width; i < range.end; i += threads * width) {
    group(i);
  }
  const int64_t head = range.begin - begin;
  const int64_t left = head + (end - range.end);
  for (int64_t j = thread; j < left; j += threads) {
    single(j < head ? begin + j : range.end + (j - head));
  }
}

}  // namespace
}  // namespace torchopt_ext

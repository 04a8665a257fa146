// The block rule of the sum of squares (docs/numerics.md section 3): its constants, the square of
// an element, and where the blocks of a chunk lie.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

inline constexpr int64_t kBlockElements = 4096;
inline constexpr int kBlockLanes = 64;
inline constexpr int64_t kShortRow = 64;

// Elements [begin, begin + length) of the tensor.
struct BlockRange {
  int64_t begin;
  int64_t length;
};

namespace {

template <class T>
TORCHOPT_HD inline double square(T x) {
  const auto wide = static_cast<double>(widen(x));
  return ScalarLane<double>::mul(wide, wide);
}

TORCHOPT_HD inline int64_t blocks_in(int64_t elements) {
  return (elements + kBlockElements - 1) / kBlockElements;
}

// The chunk [begin, end) is a run of whole rows or a run of blocks inside one row.
TORCHOPT_HD inline bool has_whole_rows(int64_t row_length, int64_t begin, int64_t end) {
  return begin % row_length == 0 && end - begin >= row_length;
}

TORCHOPT_HD inline int64_t block_count(int64_t row_length, int64_t begin, int64_t end) {
  return has_whole_rows(row_length, begin, end) ? (end - begin) / row_length * blocks_in(row_length)
                                                : blocks_in(end - begin);
}

TORCHOPT_HD inline BlockRange block_range(int64_t row_length, int64_t begin, int64_t end,
                                          int64_t block) {
  int64_t row_begin = begin;
  int64_t row_end = end;
  if (has_whole_rows(row_length, begin, end)) {
    row_begin += block / blocks_in(row_length) * row_length;
    row_end = row_begin + row_length;
    block %= blocks_in(row_length);
  }
  const int64_t first = row_begin + block * kBlockElements;
  return {first, row_end - first < kBlockElements ? row_end - first : kBlockElements};
}

}  // namespace
}  // namespace torchopt_ext

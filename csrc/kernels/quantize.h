// Moments of 8 bits: groups of elements that share a scale for each moment, and the map between a
// moment and its code. docs/numerics.md section 11.
//
// Both maps are squares, whose steps are narrow where moments are small, and which take
// multiplications alone to decode. What is stored of exp_avg_sq is the root that the update divides
// by. A step changes it so little that it would stay where it is if it were rounded to nearest: it
// is dithered by a sequence over steps and places of a group, the additive recurrence R2 (M.
// Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

// Elements that follow one another in a row; the last ones of a row may be fewer.
inline constexpr int kQuantGroup = 64;

// A group's scales: what code 1 stands for, of exp_avg and of the root of exp_avg_sq.
struct GroupScales {
  float exp_avg;
  float root;
};

namespace {

inline constexpr float kLargestSigned = 127.0f;
inline constexpr float kLargestUnsigned = 255.0f;

TORCHOPT_HD constexpr int64_t groups_in_row(int64_t row_length) {
  return (row_length + kQuantGroup - 1) / kQuantGroup;
}
// Of an element, in its tensor.
TORCHOPT_HD inline int64_t group_of(const TensorWork& work, int64_t i) {
  return i / work.row_length * groups_in_row(work.row_length) + i % work.row_length / kQuantGroup;
}

// The groups of a chunk: of whole rows, or of a part of one that begins where a group does. Groups
// and elements are counted from the chunk's first.
class ChunkGroups {
 public:
  TORCHOPT_HD ChunkGroups(const TensorWork& work, int64_t elements)
      : row_(static_cast<int>(work.row_length < elements ? work.row_length : elements)),
        in_row_(static_cast<int>(groups_in_row(row_))),
        count_(static_cast<int>(elements) / row_ * in_row_) {}

  TORCHOPT_HD int count() const { return count_; }
  TORCHOPT_HD int begin(int group) const {
    return group / in_row_ * row_ + group % in_row_ * kQuantGroup;
  }
  TORCHOPT_HD int size(int group) const {
    const int left = row_ - group % in_row_ * kQuantGroup;
    return left < kQuantGroup ? left : kQuantGroup;
  }
  TORCHOPT_HD int of(int i) const { return i / row_ * in_row_ + i % row_ / kQuantGroup; }

 private:
  int row_;
  int in_row_;
  int count_;
};

// Tracking adds up this many groups at once, which are at most as many elements as its other tiles
// have.
inline constexpr int kTileGroups = 8;

// Where those from element i on of chunk [begin, end) end.
inline int64_t end_of_groups(const TensorWork& work, int64_t begin, int64_t end, int64_t i) {
  const ChunkGroups groups(work, end - begin);
  const int next = groups.of(static_cast<int>(i - begin)) + kTileGroups;
  return next < groups.count() ? begin + groups.begin(next) : end;
}

template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg decoded_exp_avg(typename L::reg code,
                                                                          float scale) {
  return L::mul(L::mul(code, L::abs(code)), L::set1(scale));
}
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg decoded_exp_avg_sq(typename L::reg code,
                                                                             float scale) {
  const typename L::reg root = L::mul(code, L::set1(scale));
  return L::mul(root, root);
}

// Of a group whose largest magnitudes these are, or NaN.
TORCHOPT_HD inline GroupScales scales_of(float largest_exp_avg, float largest_root) {
  using L = ScalarLane<float>;
  return {L::canonical(L::div(largest_exp_avg, kLargestSigned * kLargestSigned)),
          L::canonical(L::div(largest_root, kLargestUnsigned))};
}

// What moments are multiplied by to be encoded. Zeros stay zeros where a scale is 0.
TORCHOPT_HD inline float inverse_of(float scale) {
  constexpr float kSmallestNormal = 0x1p-126f;
  return ScalarLane<float>::div(1.0f, scale > kSmallestNormal ? scale : kSmallestNormal);
}
TORCHOPT_HD inline GroupScales inverses_of(const GroupScales& scales) {
  return {inverse_of(scales.exp_avg), inverse_of(scales.root)};
}

// What is added to the root's code before it is cut off, in [0, 1). `step`: the tensor's count
// after this step.
TORCHOPT_HD inline float dither(uint32_t step, int place) {
  constexpr uint32_t kByStep = 3242174889u;   // 2^32 / 1.3247..., the plastic number
  constexpr uint32_t kByPlace = 2447445414u;  // 2^32 / its square
  const uint32_t bits = step * kByStep + static_cast<uint32_t>(place) * kByPlace;
  return ScalarLane<float>::mul(static_cast<float>(bits >> 8), 0x1p-24f);
}

// Magnitudes as codes that are yet to be rounded. Of what is not finite the code does not matter,
// as its group's scale says so, but it is the same everywhere.
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg exp_avg_code(typename L::reg m,
                                                                       float inverse) {
  return L::sqrt(L::mul(L::abs(m), L::set1(inverse)));
}
template <class L>
[[gnu::always_inline]] TORCHOPT_HD inline typename L::reg root_code(typename L::reg root,
                                                                    float inverse) {
  return L::mul(root, L::set1(inverse));
}

}  // namespace
}  // namespace torchopt_ext

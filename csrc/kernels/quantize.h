// Moments of 8 bits: groups of elements that share a scale for each moment, and the map between a
// moment and its code. docs/numerics.md section 11.
//
// Codes of exp_avg and of the root of exp_avg_sq are linear, so that a moment is one product away.
// A root's code 0 stands for one step of its scale: were it zero, an update would divide by eps. A
// step changes moments by less than a code, and rounded to nearest they would stay where they are:
// both are dithered by a sequence over steps and places of a group, the additive recurrence R2 (M.
// Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

// Elements that follow one another in a row; the last ones of a row may be fewer.
inline constexpr int kQuantGroup = 64;

// One for exp_avg, one for the root of exp_avg_sq.
template <class T>
struct Each {
  T exp_avg;
  T root;
};
using GroupScales = Each<float>;  // what a step from one code to the next stands for

namespace {

inline constexpr float kLargestCode = 127.0f;  // of exp_avg; the least is -128
inline constexpr float kRootCodes = 256.0f;
// L::load_code() gives 2^16 times a code of exp_avg, the cheapest conversion, and a root's code
// plus one.
inline constexpr float kDecodedExpAvg = 0x1p-16f;

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

// Tracking adds norms up by this many groups, which are at most as many elements as its other tiles
// have.
inline constexpr int kTileGroups = 8;

// Where these groups end, from element i of chunk [begin, end) on.
inline int64_t end_of_groups(const TensorWork& work, int64_t begin, int64_t end, int64_t i) {
  const ChunkGroups groups(work, end - begin);
  const int next = groups.of(static_cast<int>(i - begin)) + kTileGroups;
  return next < groups.count() ? begin + groups.begin(next) : end;
}

// A group's new scale, and what its moments are multiplied by to be encoded.
template <class L>
struct Encoding {
  typename L::reg scale;
  typename L::reg inverse;
};
// Of groups whose largest magnitudes these are, as multiples of `unit`. `codes`: kLargestCode or
// kRootCodes. Zeros stay zeros where a scale is 0; NaN gives every lane type the same codes.
template <class L>
TORCHOPT_HD inline Encoding<L> encoding_of(typename L::reg largest, float codes, float unit) {
  const typename L::reg step = L::div(largest, L::set1(codes));
  return {L::canonical(L::mul(step, L::set1(unit))),
          L::min(L::set1(0x1p126f), L::div(L::set1(1.0f), step))};
}

// A code of exp_avg is rounded to nearest after a number from -1/2 to 1/2 was added, one of a root
// is cut off after one from -1 to 0 was.
inline constexpr float kFromExpAvg = -0.5f;
inline constexpr float kFromRoot = -1.0f;

// What is added to the codes of a place of a group. `step`: the tensor's count after this step.
TORCHOPT_HD inline float dither(Array array, uint32_t step, int place) {
  using L = ScalarLane<float>;
  constexpr uint32_t kLonger = 3242174889u;   // 2^32 / 1.3247..., the plastic number
  constexpr uint32_t kShorter = 2447445414u;  // 2^32 / its square
  const bool is_root = array == kExpAvgSq;
  const uint32_t bits = step * (is_root ? kLonger : kShorter) +
                        static_cast<uint32_t>(place) * (is_root ? kShorter : kLonger);
  return L::add(L::mul(static_cast<float>(bits >> 8), 0x1p-24f), is_root ? kFromRoot : kFromExpAvg);
}

}  // namespace
}  // namespace torchopt_ext

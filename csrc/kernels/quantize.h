// 8-bit moments: groups of elements that share a scale for each moment, and the map between a
// moment and its code. docs/numerics.md section 11.
//
// Codes of exp_avg and of the root of exp_avg_sq are linear, so a moment is one product away. Code
// 0 of a root stands for one step of its scale: if it stood for zero, an update would divide by
// eps. A step changes moments by less than a code, and rounding to nearest would leave them
// unchanged: both are dithered by a sequence over steps and places of a group, the additive
// recurrence R2 (M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
#pragma once

#include <type_traits>

#include "kernels/algorithm.h"

namespace torchopt_ext {

// The number of consecutive elements of a row in a group; the last group of a row may be shorter.
inline constexpr int kQuantGroup = 64;

// How many 8-bit moments an algorithm has, and whether moment k is held as a root.
template <class A>
inline constexpr int kMoments = [] {
  int count = 0;
  for (const StateSpec& state : A::kStates) {
    count += state.is_moment ? 1 : 0;
  }
  return count;
}();
template <class A, int kMoment>
inline constexpr bool kIsRoot = A::kStates[kMoment].as_root;
template <class A, int kMoment>
using CodeOf = std::conditional_t<kIsRoot<A, kMoment>, uint8_t, int8_t>;

// A value for each moment.
template <class A, class T>
struct PerMoment {
  T of[kMoments<A>];
};

namespace {

// The largest code; the smallest of a moment that is no root is -128.
template <class A, int kMoment>
inline constexpr float kCodes = kIsRoot<A, kMoment> ? 256.0f : 127.0f;
// L::load_code() returns 2^16 times a code, which is the cheapest conversion, or a root's code plus
// one.
inline constexpr float kCodeUnit = 0x1p-16f;

// Calls f(k) for each moment, with k known at compile time.
template <class A, class F>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_moment(const F& f) {
  static_assert(kMoments<A> <= kMostMoments && kMostMoments == 2);
  f(std::integral_constant<int, 0>{});
  if constexpr (kMoments<A> == 2) {
    f(std::integral_constant<int, 1>{});
  }
}

TORCHOPT_HD constexpr int64_t groups_in_row(int64_t row_length) {
  return (row_length + kQuantGroup - 1) / kQuantGroup;
}
// Returns the index of an element's group in its tensor.
TORCHOPT_HD inline int64_t group_of(const TensorWork& work, int64_t i) {
  return i / work.row_length * groups_in_row(work.row_length) + i % work.row_length / kQuantGroup;
}

// The groups of a chunk, which is whole rows, or a part of a row that begins at a group. Groups and
// elements are counted from the chunk's first.
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

// The number of groups in a tile, by which tracking sums norms. Such a tile has at most as many
// elements as the tiles of other tensors.
inline constexpr int kTileGroups = 8;

// A group's new scale, and the factor that turns its moments into codes.
template <class L>
struct Encoding {
  typename L::reg scale;
  typename L::reg inverse;
};
// Returns the encoding of groups from their largest magnitudes, in multiples of `unit`. `codes` is
// kCodes. The bound of `inverse` keeps zeros zero where a scale is 0. A NaN
// gives the same codes in every lane type.
template <class L>
TORCHOPT_HD inline Encoding<L> encoding_of(typename L::reg largest, float codes, float unit) {
  const typename L::reg step = L::div(largest, L::set1(codes));
  return {L::canonical(L::mul(step, L::set1(unit))),
          L::min(L::set1(0x1p126f), L::div(L::set1(1.0f), step))};
}

// The smallest number that dither adds. A code gets a number from -1/2 to 1/2 and is rounded to
// nearest; a code of a root gets a number from -1 to 0 and is truncated.
TORCHOPT_HD constexpr float dither_start(bool is_root) { return is_root ? -1.0f : -0.5f; }

// Returns the dither of the codes at a place of a group. `step`: the count after this step.
TORCHOPT_HD inline float dither(bool is_root, uint32_t step, int place) {
  using L = ScalarLane<float>;
  constexpr uint32_t kLonger = 3242174889u;   // 2^32 / 1.3247..., the plastic number
  constexpr uint32_t kShorter = 2447445414u;  // 2^32 / the plastic number's square
  const uint32_t bits = step * (is_root ? kLonger : kShorter) +
                        static_cast<uint32_t>(place) * (is_root ? kShorter : kLonger);
  return L::add(L::mul(static_cast<float>(bits >> 8), 0x1p-24f), dither_start(is_root));
}

}  // namespace
}  // namespace torchopt_ext

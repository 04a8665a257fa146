// What the loop over 8-bit moments (quantized_loop.h) keeps of the groups that it steps together.
#pragma once

#include <cstring>

#include "cpu/adam_loop.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// The random bits of a group, all of whose elements take the stream of the first one.
class GroupDraws {
 public:
  explicit GroupDraws(const RoundingKey& key) : key_(key) {}

  void start(uint64_t number) {
    if (number >> kStreamBits != upper_) {
      upper_ = number >> kStreamBits;
      draws_.stream = rounding_stream(key_, number);
    }
    draws_.first = static_cast<uint32_t>(number);
  }
  template <class L>
  typename L::Random of(int64_t i) const {
    return L::random(draws_.stream, draws_.first + static_cast<uint32_t>(i));
  }

 private:
  RoundingKey key_;
  uint64_t upper_ = ~uint64_t{0};
  Draws draws_{};
};

// Groups whose moments are kept until their scales are known: several, so that these are found
// together.
inline constexpr int kGroupsAtOnce = 16;

// One moment of them between the parts of a step.
template <class L>
struct KeptMoment {
  using One = typename L::One;

  [[gnu::always_inline]] void set_largest(int group, typename L::reg a) {
    most[group / One::width][group % One::width] = L::folded(a);
  }
  // Takes the scales of `count` groups.
  [[gnu::always_inline]] void start(const float* scales, int count, float factor) {
    for (int g = 0; g < count; g += One::width) {
      One::store(decoding + g, One::mul(One::load_part(scales + g, count - g), One::set1(factor)));
    }
  }
  // Stores their new ones.
  [[gnu::always_inline]] void find_scales(float* scales, int count, float codes, float unit) {
    for (int g = 0; g < count; g += One::width) {
      One::largest(most[g / One::width], inverse + g);
      const auto encoding = encoding_of<One>(One::load(inverse + g), codes, unit);
      One::store(inverse + g, encoding.inverse);
      if (count - g >= One::width) {  // a masked store takes longer
        One::store(scales + g, encoding.scale);
      } else {
        One::store_part(scales + g, encoding.scale, count - g);
      }
    }
  }

  alignas(64) float value[kGroupsAtOnce][kQuantGroup];
  // A register of a group each, whose largest element is the group's.
  typename One::reg most[kGroupsAtOnce / One::width][One::width] = {};
  alignas(64) float decoding[kGroupsAtOnce];  // what codes are multiplied by
  alignas(64) float inverse[kGroupsAtOnce];   // what moments are multiplied by
};

// What is added to the codes of a group: dither, in the order in which registers are kept.
template <class L>
struct Added {
  explicit Added(const TensorWork& work) {
    const auto step = static_cast<uint32_t>(static_cast<int64_t>(step_of(work)));
    for (int k = 0; k < kQuantGroup; ++k) {
      exp_avg[k] = dither(kExpAvg, step, k);
      root[k] = dither(kExpAvgSq, step, k);
    }
    for (int k = 0; k < kQuantGroup; k += L::width) {
      L::keep(exp_avg + k, L::load(exp_avg + k));
      L::keep(root + k, L::load(root + k));
    }
  }
  alignas(64) float exp_avg[kQuantGroup];
  alignas(64) float root[kQuantGroup];
};

// Copies of short groups, padded by their own elements, which change no scale.
class ShortGroups {
 public:
  ShortGroups() {
    for (int array = 0; array < kArrays; ++array) {
      memory[array] = copies_[array];
    }
  }

  void load(int group, const Layout& layout, void* const (&x)[kArrays], int64_t first, int size) {
    const auto load = [&](char* copy, char* element, int64_t bytes) {
      std::memcpy(copy, element, static_cast<size_t>(size * bytes));
      for (int n = size; n < kQuantGroup; n *= 2) {
        const int more = n < kQuantGroup - n ? n : kQuantGroup - n;
        std::memcpy(copy + n * bytes, copy, static_cast<size_t>(more * bytes));
      }
    };
    for_each_written(layout, [&](Array array) { visit(array, layout, group, x, first, load); });
    visit(kGrad, layout, group, x, first, load);
  }
  void store(int group, const Layout& layout, const StepMode& mode, void* const (&x)[kArrays],
             int64_t first, int size) const {
    const auto store = [&](char* copy, char* element, int64_t bytes) {
      std::memcpy(element, copy, static_cast<size_t>(size * bytes));
    };
    for_each_written(layout, [&](Array array) { visit(array, layout, group, x, first, store); });
    if (mode.write_back) {
      visit(kGrad, layout, group, x, first, store);
    }
  }

  void* memory[kArrays];

 private:
  // copy(to or from the copy, the elements, bytes of one).
  template <class Copy>
  void visit(Array array, const Layout& layout, int group, void* const (&x)[kArrays], int64_t first,
             const Copy& copy) const {
    const int64_t bytes = element_size(layout, array);
    copy(static_cast<char*>(memory[array]) + group * kQuantGroup * bytes,
         static_cast<char*>(x[array]) + first * bytes, bytes);
  }

  alignas(64) char copies_[kArrays][kGroupsAtOnce * kQuantGroup * sizeof(float)];
};

}  // namespace
}  // namespace torchopt_ext

// State that the loop over 8-bit moments (quantized_loop.h) buffers for groups updated together.
#pragma once

#include <cstring>

#include "cpu/update_loop.h"
#include "kernels/quantize.h"

namespace torchopt_ext {
namespace {

// The random bits of a group. All of its elements use the stream of its first element.
class GroupDraws : public Draws {
 public:
  explicit GroupDraws(const RoundingKey& key) : Draws{}, key_(key) {}

  void start(uint64_t number) {
    if (number >> kStreamBits != upper_) {
      upper_ = number >> kStreamBits;
      stream = rounding_stream(key_, number);
    }
    first = static_cast<uint32_t>(number);
  }

 private:
  RoundingKey key_;
  uint64_t upper_ = ~uint64_t{0};
};

// The number of groups updated together. Their moments are buffered until find_scales() has
// computed the scales, a register of groups at a time.
inline constexpr int kGroupsAtOnce = 16;

// Returns a register with the largest magnitude of the moments `a`.
template <class L, bool kIsRoot, bool kOfNumbers = false>
[[gnu::always_inline]] inline typename L::SingleLane::reg magnitude_of(typename L::reg a) {
  if constexpr (kOfNumbers) {
    return L::max_of_numbers(a);
  } else {
    return L::max_of_pair(kIsRoot ? a : L::abs(a));
  }
}

// One moment of kGroupsAtOnce groups, buffered between the parts of a step.
template <class L>
struct BufferedMoment {
  using SingleLane = typename L::SingleLane;

  [[gnu::always_inline]] void set_largest(int group, typename SingleLane::reg a) {
    largest_registers[group / SingleLane::width][group % SingleLane::width] = a;
  }
  [[gnu::always_inline]] void find_largest(int count) {
    for (int g = 0; g < count; g += SingleLane::width) {
      SingleLane::largest(largest_registers[g / SingleLane::width], largest + g);
    }
  }
  // As the loop and find_largest(), where `value` may have NaNs.
  [[gnu::cold, gnu::noinline]] void find_largest_or_nan(int count) {
    for (int g = 0; g < count; ++g) {
      typename SingleLane::reg most{};
      for (int k = 0; k < kQuantGroup; k += L::width) {
        const auto magnitude = magnitude_of<L, false>(L::load_temporary(value[g] + k));
        most = SingleLane::max_magnitude(most, magnitude);
      }
      set_largest(g, most);
    }
    find_largest(count);
  }
  // Computes the decoding factors of `count` groups from their scales.
  [[gnu::always_inline]] void load_scales(const float* scales, int count, float factor) {
    for (int g = 0; g < count; g += SingleLane::width) {
      SingleLane::store(decoding + g, SingleLane::mul(SingleLane::load_part(scales + g, count - g),
                                                      SingleLane::set1(factor)));
    }
  }
  // Stores the scales after this step and computes the encoding factors.
  [[gnu::always_inline]] void find_scales(float* scales, int count, float codes, float unit) {
    for (int g = 0; g < count; g += SingleLane::width) {
      const auto encoding = encoding_of<SingleLane>(SingleLane::load(largest + g), codes, unit);
      SingleLane::store(inverse + g, encoding.inverse);
      if (count - g >= SingleLane::width) {  // a masked store takes longer
        SingleLane::store(scales + g, encoding.scale);
      } else {
        SingleLane::store_part(scales + g, encoding.scale, count - g);
      }
    }
  }

  alignas(64) float value[kGroupsAtOnce][kQuantGroup];
  // One register per group. Its largest element is the largest magnitude of the group.
  typename SingleLane::reg largest_registers[kGroupsAtOnce / SingleLane::width][SingleLane::width] =
      {};
  alignas(64) float decoding[kGroupsAtOnce];  // factors from codes to moments
  alignas(64) float largest[kGroupsAtOnce];   // magnitudes
  alignas(64) float inverse[kGroupsAtOnce];   // factors from moments to codes
};

// The dither that is added to the codes of a group, in the order of L::store_temporary().
template <class A, class L>
struct GroupDither {
  explicit GroupDither(const TensorWork& work) {
    const auto step = static_cast<uint32_t>(static_cast<int64_t>(step_of(work)));
    for_each_moment<A>([&](auto moment) {
      float* const to = of[moment];
      for (int k = 0; k < kQuantGroup; ++k) {
        to[k] = dither(kIsRoot<A, moment>, step, k);
      }
      for (int k = 0; k < kQuantGroup; k += L::width) {
        L::store_temporary(to + k, L::load(to + k));
      }
    });
  }
  alignas(64) float of[kMoments<A>][kQuantGroup];
};

// Copies of short groups, padded with their own elements, so that the padding changes no scale.
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
  // Calls copy(address in the copy, address in the tensor's array, bytes per element).
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

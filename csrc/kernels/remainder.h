// A float split into a bf16 weight and an int16 remainder. The weight is always the float rounded
// to nearest even: the model computes with the cast of the exact value. docs/numerics.md section 7.
//
// Sixteen bits in addition to the weight cannot name every float that rounds to it: 65,537 floats
// round to an even weight, because both of its ties do. The tie above an even weight is therefore
// moved one float toward the weight; every other float is kept exactly (TransformerEngine and apex
// keep the tie instead and decode a weight that is not the rounded value: NVIDIA/apex#1842).
//
// With an int8 the pair has the upper 24 bits of a float, again except for ties above even weights.
// A float is stored as its nearest weight with the nearest remainder, so that weights are the same
// as with an int16, or stochastically as one of the two pairs around the float.
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

template <class Remainder>
struct SplitFloat {
  BFloat16 weight;
  Remainder remainder;
};

namespace {

// A weight of 0 with a negative remainder is no split float: the weight was set from outside, for
// example by a mask. Its remainder counts as 0, since their sum would be a NaN.
TORCHOPT_HD inline float join(BFloat16 weight, int16_t remainder) {
  const bool invalid = remainder < 0 && (weight.bits & 0x7fffu) == 0;
  const auto low = invalid ? 0u : static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return bit_cast<float>((static_cast<uint32_t>(weight.bits) << 16) + low);
}

TORCHOPT_HD inline float join(BFloat16 weight, int8_t remainder) {
  return join(weight, static_cast<int16_t>(remainder * 256));
}

// Returns whether the bits are the tie above an even weight, which no pair names.
TORCHOPT_HD inline bool is_unrepresentable(uint32_t bits) { return (bits & 0x1ffffu) == 0x08000u; }

// A NaN must be canonical.
TORCHOPT_HD inline SplitFloat<int16_t> split(float x) {
  auto bits = bit_cast<uint32_t>(x);
  bits -= is_unrepresentable(bits) ? 1u : 0u;
  // The remainder is bits - (weight << 16), whose low half is the low half of bits.
  return {narrow<BFloat16>(bit_cast<float>(bits)),
          static_cast<int16_t>(static_cast<uint16_t>(bits))};
}

// Returns the weight of split() and the nearest remainder, of two equally near remainders the lower
// one if bit 16 of x is 0, otherwise the upper one.
TORCHOPT_HD inline SplitFloat<int8_t> split8(float x) {
  const auto weight = narrow<BFloat16>(x);
  const auto rest =
      static_cast<int32_t>(bit_cast<uint32_t>(x) - (static_cast<uint32_t>(weight.bits) << 16));
  const auto even = static_cast<int32_t>(~(bit_cast<uint32_t>(x) >> 16) & 1);
  const int32_t nearest = (rest - even + 0x80) >> 8;
  // Rounding up from an even half makes the weight odd; the tie below is the even weight's.
  const int32_t lowest = even - 128;
  const int32_t raised = nearest < lowest ? lowest : nearest;
  return {weight, static_cast<int8_t>(raised > 127 ? 127 : raised)};
}

// Returns one of the two pairs around x, the upper with a probability equal to the part of their
// distance below x. Around an unrepresentable float they lie twice as far apart, which takes one
// more bit.
TORCHOPT_HD inline SplitFloat<int8_t> split8_stochastic(float x, uint32_t draw) {
  uint32_t bits = (bit_cast<uint32_t>(x) + (draw & 0xffu)) & ~0xffu;
  if (is_unrepresentable(bits)) {
    bits += (draw & 0x100u) != 0 ? 0x100u : ~0xffu;
  }
  return {narrow<BFloat16>(bit_cast<float>(bits)),
          static_cast<int8_t>(static_cast<uint8_t>(bits >> 8))};
}

}  // namespace
}  // namespace torchopt_ext

// A float held as a bf16 weight and the int16 that is missing from it. The weight is always the
// float rounded to nearest even, so that what the model computes with is what a cast of the exact
// value would give. docs/numerics.md section 7.
//
// Sixteen bits beside the weight cannot name every float that rounds to it: an even weight has
// 65,537, as both of its ties round to it. The tie above an even weight is therefore moved one
// float towards it; everything else is kept exactly (TransformerEngine and apex keep the tie
// instead and decode a weight that is not the rounded value: NVIDIA/apex#1842).
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

struct SplitFloat {
  BFloat16 weight;
  int16_t remainder;
};

namespace {

TORCHOPT_HD inline float join(BFloat16 weight, int16_t remainder) {
  const auto low = static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return bit_cast<float>((static_cast<uint32_t>(weight.bits) << 16) + low);
}

// A NaN must be canonical.
TORCHOPT_HD inline SplitFloat split(float x) {
  auto bits = bit_cast<uint32_t>(x);
  bits -= (bits & 0x1ffffu) == 0x08000u ? 1u : 0u;
  const uint32_t weight = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // bits - (weight << 16), of which the low half is that of bits
  return {{static_cast<uint16_t>(weight)}, static_cast<int16_t>(static_cast<uint16_t>(bits))};
}

}  // namespace
}  // namespace torchopt_ext

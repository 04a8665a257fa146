// An exact sum of doubles: docs/numerics.md section 3. A fixed-point number with 32-bit digits in
// signed 64-bit limbs, wide enough for any finite double, so that neither the order of addition
// nor the number of threads, blocks or ranks can change the result. (Kulisch's long accumulator;
// the redundant digits postpone carries as in Neal, arXiv:1505.05571.)
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

// Also the layout of the int64[70] accumulator tensor.
struct ExactAccumulator {
  static constexpr int kLimbs = 68;
  static constexpr int kInfinities = kLimbs;   // a counter of addends that were infinite
  static constexpr int kNans = kLimbs + 1;     // a counter of addends that were NaN
  static constexpr int kBaseExponent = -1088;  // weight of limb 0's lowest bit
  static constexpr int kSize = kLimbs + 2;
  // An addition changes a limb by less than 2**32: normalize after at most this many additions.
  static constexpr int64_t kMaxPendingAdds = int64_t{1} << 30;

  int64_t limb[kSize];
};

namespace {

// Changes up to three limbs or one counter.
TORCHOPT_HD inline void accumulator_add(ExactAccumulator& acc, double x) {
  const auto bits = bit_cast<uint64_t>(x);
  const int exponent = static_cast<int>((bits >> 52) & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent == 0x7ff) {
    acc.limb[mantissa != 0 ? ExactAccumulator::kNans : ExactAccumulator::kInfinities] += 1;
    return;
  }
  mantissa |= exponent != 0 ? uint64_t{1} << 52 : 0;
  if (mantissa == 0) {
    return;
  }
  // x = mantissa * 2**(max(exponent, 1) - 1075)
  const int shift = (exponent != 0 ? exponent : 1) - 1075 - ExactAccumulator::kBaseExponent;
  const int index = shift / 32;
  const int offset = shift % 32;
  const uint64_t low = mantissa << offset;
  const uint64_t high = offset != 0 ? mantissa >> (64 - offset) : 0;
  const int64_t sign = (bits >> 63) != 0 ? -1 : 1;
  acc.limb[index] += sign * static_cast<int64_t>(low & 0xffffffffu);
  acc.limb[index + 1] += sign * static_cast<int64_t>(low >> 32);
  if (high != 0) {
    acc.limb[index + 2] += sign * static_cast<int64_t>(high);
  }
}

// Propagates carries, so that all limbs except the last are in [0, 2**32). Keeps the value.
inline void accumulator_normalize(ExactAccumulator& acc) {
  int64_t carry = 0;
  for (int k = 0; k < ExactAccumulator::kLimbs - 1; ++k) {
    const int64_t digit = acc.limb[k] + carry;
    acc.limb[k] = digit & 0xffffffff;
    carry = digit >> 32;
  }
  acc.limb[ExactAccumulator::kLimbs - 1] += carry;
}

inline void accumulator_merge(ExactAccumulator& into, const ExactAccumulator& from) {
  for (int k = 0; k < ExactAccumulator::kSize; ++k) {
    into.limb[k] += from.limb[k];
  }
}

// Rounds a finite sum to nearest even. `limbs` are the digits of its magnitude. `top` is the
// highest limb that is not 0, or 0. `below` says whether a limb below limb top - 2 is not 0.
TORCHOPT_HD inline double rounded(const int64_t* limbs, bool negative, int top, bool below) {
  const auto limb = [&](int k) { return k < 0 ? 0 : static_cast<uint64_t>(limbs[k]); };
  const uint64_t first = limb(top);
  const uint64_t second = limb(top - 1);
  const uint64_t third = limb(top - 2);
  const uint64_t sign = negative ? uint64_t{1} << 63 : 0;
  if (first == 0) {
    return 0.0;
  }
  if (top == ExactAccumulator::kLimbs - 1) {  // 2**1056 and above
    return bit_cast<double>(sign | 0x7ff0000000000000u);
  }
  // The 64 bits from the leading 1 bit down, and whether any lower bit is set.
  int lead = 0;
  while (((first << lead) & 0x80000000u) == 0) {
    ++lead;
  }
  const uint64_t significand = (((first << 32) | second) << lead) | ((third << lead) >> 32);
  const bool sticky = below || ((third << lead) & 0xffffffffu) != 0;
  // The exponent of the leading 1 bit.
  const int exponent = 63 + 32 * (top - 1) + ExactAccumulator::kBaseExponent - lead;
  if (exponent > 1023) {
    return bit_cast<double>(sign | 0x7ff0000000000000u);
  }
  if (exponent < -1022) {  // a sum of doubles is a multiple of 2**-1074: exact
    const int drop = 11 - 1022 - exponent;
    return bit_cast<double>(sign | (drop < 64 ? significand >> drop : 0));
  }
  const uint64_t kept = significand >> 11;
  const uint64_t rest = significand & 0x7ff;
  const bool up = rest > 0x400 || (rest == 0x400 && (sticky || (kept & 1) != 0));
  // A carry out of the significand correctly increments the exponent, up to infinity.
  const uint64_t magnitude = (static_cast<uint64_t>(exponent + 1022) << 52) + kept;
  return bit_cast<double>(sign | (magnitude + (up ? 1 : 0)));
}

// Returns the sum when an addend was not finite.
TORCHOPT_HD inline double nonfinite_total(bool has_nan) {
  return bit_cast<double>(has_nan ? uint64_t{0x7ff8000000000000} : uint64_t{0x7ff0000000000000});
}

// Returns the sum, rounded once to nearest even.
inline double accumulator_total(ExactAccumulator acc) {
  const bool has_nan = acc.limb[ExactAccumulator::kNans] != 0;
  if (has_nan || acc.limb[ExactAccumulator::kInfinities] != 0) {
    return nonfinite_total(has_nan);
  }
  accumulator_normalize(acc);
  const bool negative = acc.limb[ExactAccumulator::kLimbs - 1] < 0;
  if (negative) {
    for (int64_t& limb : acc.limb) {
      limb = -limb;
    }
    accumulator_normalize(acc);
  }
  int top = ExactAccumulator::kLimbs - 1;
  while (top > 0 && acc.limb[top] == 0) {
    --top;
  }
  bool below = false;
  for (int k = top - 3; k >= 0; --k) {
    below = below || acc.limb[k] != 0;
  }
  return rounded(acc.limb, negative, top, below);
}

}  // namespace
}  // namespace torchopt_ext

// Two float registers as one lane, for 16-bit and 8-bit elements. One memory access serves both
// registers, and a register of 16-bit words holds the whole pair, which halves the operations.
// Elements are in the order of x86's unpack and pack instructions: of every eight, four are in the
// lower register and four in the upper. L is the lane type of one register.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

template <class L>
struct PairLane {
  using SingleLane = L;
  using scalar = float;
  using Words = typename L::Words;
  struct reg {
    typename L::reg lower;
    typename L::reg upper;
  };
  struct Random {
    RandomWords<Words> lower;
    RandomWords<Words> upper;
  };
  static constexpr int width = 2 * L::width;
  static constexpr bool converts = true;
  static constexpr bool has_narrow_types = true;

  // Floats and fp16 take two accesses.
  template <class Element>
  static reg load(const Element* x) {
    reg a{L::load(x), L::load(x + L::width)};
    L::to_pair_order(a.lower, a.upper);
    return a;
  }
  template <class Element>
  static void store(Element* x, reg a) {
    L::to_memory_order(a.lower, a.upper);
    L::store(x, a.lower);
    L::store(x + L::width, a.upper);
  }
  template <class Element>
  static void stream(Element* x, reg a) {
    L::to_memory_order(a.lower, a.upper);
    L::stream(x, a.lower);
    L::stream(x + L::width, a.upper);
  }
  static void store_temporary(float* x, reg a) {
    L::store(x, a.lower);
    L::store(x + L::width, a.upper);
  }
  static reg load_temporary(const float* x) { return {L::load(x), L::load(x + L::width)}; }

  static reg load(const BFloat16* x) { return floats(Words::set1(0), Words::load(x)); }
  static void store(BFloat16* x, reg a) {
    Words::store(x, Words::packed(nearest_half(a.lower), nearest_half(a.upper)));
  }
  static void store_stochastic(BFloat16* x, reg a, const Random& random, Array array) {
    Words::store(x, Words::packed(random_half(a.lower, random_bits_of(random.lower, array)),
                                  random_half(a.upper, random_bits_of(random.upper, array))));
  }

  static reg load_joined(const BFloat16* weight, const int16_t* remainder) {
    return load_joined(Words::load(weight), Words::load(remainder));
  }
  static reg load_joined(const BFloat16* weight, const int8_t* remainder) {
    return load_joined(Words::load(weight), Words::left_halves(Words::load_halves(remainder), 8));
  }
  static void store_split(BFloat16* weight, int16_t* remainder, reg a) {
    const auto [high, low] = halves_of(L::bits(a.lower), L::bits(a.upper));
    const Word rest = Words::lowered_ties(high, low);
    Words::store(weight, Words::sub_halves(high, Words::sign_halves(rest)));
    Words::store(remainder, rest);
  }
  static void store_split(BFloat16* weight, int8_t* remainder, reg a) {
    const auto [nearest, even] = split8(weight, a);
    const Word lowest = Words::bit_or(even, Words::halves(-128));
    Words::store_bytes(remainder, Words::max_halves(nearest, lowest));
  }
  // Stores the elements of two registers.
  static void store_split(BFloat16* weight, int8_t* remainder, reg a, reg b) {
    const auto [nearest_a, even_a] = split8(weight, a);
    const auto [nearest_b, even_b] = split8(weight + width, b);
    Words::store_bytes_above(remainder, nearest_a, nearest_b, even_a, even_b);
  }
  // The tie above an even weight (remainder.h) goes up if bit 8 of its draw is set, otherwise down:
  // its remainder of 128 then saturates to 127.
  static void store_split_stochastic(BFloat16* weight, int8_t* remainder, reg a,
                                     const Random& random) {
    const Word one = Words::halves(1);
    const Word mask = Words::set1(0xff);
    const Word lower = random_bits_of(random.lower, kParam);
    const Word upper = random_bits_of(random.upper, kParam);
    const Word draws = Words::packed(lower, upper);
    auto [high, low] = halves_of(Words::add(L::bits(a.lower), Words::bit_and(lower, mask)),
                                 Words::add(L::bits(a.upper), Words::bit_and(upper, mask)));
    Word byte = Words::shifted_halves(low, 8);
    const Word odd = Words::bit_and(high, one);
    const Word named = Words::bit_or(Words::bit_xor(byte, Words::halves(0x80)), odd);
    const Word unnamed = Words::shifted_halves(Words::sub_halves(named, one), 15);
    byte = Words::add_halves(byte, Words::bit_and(unnamed, Words::shifted_halves(draws, 8)));
    const Word up = Words::shifted_halves(
        Words::add_halves(byte, Words::add_halves(odd, Words::halves(0x7f))), 8);
    Words::store(weight, Words::add_halves(high, up));
    Words::store_bytes(remainder, Words::sub_halves(byte, Words::left_halves(up, 8)));
  }

  static reg load_code(const int8_t* x) {
    const Word codes = Words::load_halves(x);
    return {L::from_words(Words::unpack_low(Words::set1(0), codes)),
            L::from_words(Words::unpack_high(Words::set1(0), codes))};
  }
  static reg load_code(const uint8_t* x) {
    const Word codes = Words::load_halves(x);
    const Word exponent = Words::halves(0x4b00);  // upper half of 2^23, whose low half is the code
    return sub(floats(codes, exponent), set1(0x1p23f - 1.0f));
  }
  // Stores the codes of two registers. NaN converts to the least integer.
  static void store_codes(int8_t* x, reg a, reg b) {
    const auto halves = [](reg code) {
      return Words::packed_signed(L::rounded_words(code.lower), L::rounded_words(code.upper));
    };
    Words::store_bytes(x, halves(a), halves(b));
  }
  static void store_codes(uint8_t* x, reg a, reg b) {
    const auto halves = [](reg code) {
      return Words::packed(L::truncated_words(code.lower), L::truncated_words(code.upper));
    };
    Words::store_bytes(x, halves(a), halves(b));
  }

  static Random random(const RoundingStream& stream, uint32_t number) {
    return {random_words<Words>(stream, number), random_words<Words>(stream, number + 4)};
  }
  static reg fraction(const Random& random, Array array) {
    const auto part = [&](const RandomWords<Words>& words) {
      return L::mul(L::from_words(random_bits_of(words, array)), L::set1(0x1p-16f));
    };
    return {part(random.lower), part(random.upper)};
  }

  static reg set1(float a) { return {L::set1(a), L::set1(a)}; }
  static reg set1_in_register(float a) {
    const typename L::reg one = L::set1_in_register(a);
    return {one, one};
  }
  static reg add(reg a, reg b) { return {L::add(a.lower, b.lower), L::add(a.upper, b.upper)}; }
  static reg sub(reg a, reg b) { return {L::sub(a.lower, b.lower), L::sub(a.upper, b.upper)}; }
  static reg mul(reg a, reg b) { return {L::mul(a.lower, b.lower), L::mul(a.upper, b.upper)}; }
  static reg fma(reg a, reg b, reg c) {
    return {L::fma(a.lower, b.lower, c.lower), L::fma(a.upper, b.upper, c.upper)};
  }
  static reg div(reg a, reg b) { return {L::div(a.lower, b.lower), L::div(a.upper, b.upper)}; }
  static reg sqrt(reg a) { return {L::sqrt(a.lower), L::sqrt(a.upper)}; }
  static reg min(reg a, reg b) { return {L::min(a.lower, b.lower), L::min(a.upper, b.upper)}; }
  static reg neg(reg a) { return {L::neg(a.lower), L::neg(a.upper)}; }
  static reg max_keep_nan(reg vmax, reg v) {
    return {L::max_keep_nan(vmax.lower, v.lower), L::max_keep_nan(vmax.upper, v.upper)};
  }
  static reg abs(reg a) { return {L::abs(a.lower), L::abs(a.upper)}; }
  static reg sub_bits(reg a, reg b) {
    return {L::sub_bits(a.lower, b.lower), L::sub_bits(a.upper, b.upper)};
  }
  static reg max_magnitude(reg a, reg b) {
    return {L::max_magnitude(a.lower, b.lower), L::max_magnitude(a.upper, b.upper)};
  }
  // Returns the element-wise maximum of the pair's two registers of magnitudes.
  static typename L::reg max_of_pair(reg a) { return L::max_magnitude(a.lower, a.upper); }
  static typename L::reg max_of_numbers(reg a) { return L::max_of_numbers(a.lower, a.upper); }
  static int count_lost(reg before, reg after, reg exp_avg, bool decays) {
    return L::count_lost(before.lower, after.lower, exp_avg.lower, decays) +
           L::count_lost(before.upper, after.upper, exp_avg.upper, decays);
  }
  static reg canonical(reg a) { return {L::canonical(a.lower), L::canonical(a.upper)}; }

 private:
  using Word = typename Words::reg;

  static reg floats(Word low, Word high) {
    return {L::from_bits(Words::unpack_low(low, high)),
            L::from_bits(Words::unpack_high(low, high))};
  }
  static Word nearest_half(typename L::reg a) { return nearest_upper_half(L::bits(a)); }
  static Word random_half(typename L::reg a, Word draw) {
    return Words::shifted(Words::add(L::bits(a), draw), 16);
  }
  // `low`: the lower halves. A negative lower half subtracts 1 from the upper half.
  static reg load_joined(Word weight, Word low) {
    const Word rest = Words::valid_remainders(weight, low);
    return floats(rest, Words::add_halves(weight, Words::sign_halves(rest)));
  }
  struct Remainders {
    Word nearest;
    Word even;  // 1 above an even upper half, 0 above an odd one
  };
  // Stores the weights. Their 8-bit remainders are `nearest`, but at least `even` - 128. Storing
  // saturates 128 to 127.
  static Remainders split8(BFloat16* weight, reg a) {
    const auto [high, low] = halves_of(L::bits(a.lower), L::bits(a.upper));
    const Word even = Words::bit_and_not(high, Words::template loaded_halves<1>());
    // `a` minus its weight as int16, minus 1 if the upper half is even, so that its ties go down.
    const Word rest = Words::sub_saturated(low, even);
    Words::store(weight, Words::sub_halves(high, Words::sign_halves(rest)));
    return {Words::rounded_upper_bytes(rest), even};
  }
  struct Halves {
    Word high;
    Word low;
  };
  static Halves halves_of(Word lower, Word upper) {
    Words::split_halves(lower, upper);
    return {upper, lower};
  }
};

}  // namespace
}  // namespace torchopt_ext

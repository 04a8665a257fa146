// The digest of elements that follow one another: kernels/digest.h, a register of words at a time.
#pragma once

#include <type_traits>

#include "kernels/digest.h"

namespace torchopt_ext {
namespace {

template <class W>
inline typename W::reg mix(typename W::reg x) {
  x = W::multiply(W::bit_xor(x, W::template shifted<16>(x)), W::set1(kMixFirst));
  x = W::multiply(W::bit_xor(x, W::template shifted<15>(x)), W::set1(kMixSecond));
  return W::bit_xor(x, W::template shifted<15>(x));
}

// Elements of 2 or 4 bytes, as many as fill registers; returns how many. Their numbers share their
// upper half. Even words are the lower ones of a register's pairs.
template <class W, class Bits>
int64_t digest_of_registers(uint32_t salt, uint64_t first_element, const Bits* bits, int64_t n,
                            uint64_t& digest) {
  const auto base = W::set1(digest_base(salt, first_element));
  const auto one = W::set1(1);
  const auto step = W::set1(W::width);
  auto number = W::add(W::set1(static_cast<uint32_t>(first_element)), W::multiples(1));
  auto even = W::set1(0);
  auto odd = W::set1(0);
  int64_t i = 0;
  for (; i + W::width <= n; i += W::width) {
    const auto words = W::load(bits + i);
    const auto factors = W::bit_or(mix<W>(W::bit_xor(number, base)), one);
    even = W::add_pairs(even, W::multiply_lower(words, factors));
    odd = W::add_pairs(odd, W::multiply_lower(W::upper(words), W::upper(factors)));
    number = W::add(number, step);
  }
  uint64_t lanes[W::width / 2];
  W::store_pairs(lanes, W::add_pairs(even, odd));
  for (const uint64_t lane : lanes) {
    digest += lane;
  }
  return i;
}

// W is void where there are no lanes.
template <class W, class Bits>
uint64_t digest(const void* x, uint32_t salt, int64_t first_element, int64_t n) {
  const auto* bits = static_cast<const Bits*>(x);
  uint64_t sum = 0;
  for (int64_t i = 0; i < n;) {
    const auto element = static_cast<uint64_t>(first_element + i);
    const int64_t same_high = (int64_t{1} << 32) - static_cast<int64_t>(element & 0xffffffffu);
    const int64_t length = same_high < n - i ? same_high : n - i;
    int64_t done = 0;
    if constexpr (!std::is_void_v<W> && sizeof(Bits) <= sizeof(uint32_t)) {
      done = digest_of_registers<W>(salt, element, bits + i, length, sum);
    }
    sum += digest_run(salt, element + static_cast<uint64_t>(done), bits + i + done, length - done);
    i += length;
  }
  return sum;
}

}  // namespace
}  // namespace torchopt_ext

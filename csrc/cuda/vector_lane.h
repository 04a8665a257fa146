// A lane type (kernels/lane.h) of a CUDA thread. A register is kWidth elements in runs of kRun,
// which begin kStride elements apart. An access takes up to kAccess elements and 16 bytes; arrays
// must be aligned to it.
#pragma once

#include "cuda/vector.h"
#include "kernels/lane.h"

namespace torchopt_ext {
namespace {

template <class T, int kWidth, int kRun = kWidth, int kStride = kWidth, int kAccess = kRun>
struct VectorLane {
  using scalar = T;
  using SingleLane = ScalarLane<T>;
  struct reg {
    T element[kWidth];
  };
  static constexpr int width = kWidth;
  static constexpr bool converts = SingleLane::converts;
  static constexpr bool has_narrow_types = SingleLane::has_narrow_types;
  // Returns the distance of element k from the register's first element.
  TORCHOPT_HD static constexpr int offset(int k) { return k / kRun * kStride + k % kRun; }

  template <class Element>
  TORCHOPT_HD static reg load(const Element* from) {
    const auto bits = load_elements<sizeof(Element)>(from);
    return map([&](int k) { return widen(bit_cast<Element>(bits.element[k])); });
  }
  template <class Element>
  TORCHOPT_HD static void store(Element* to, const reg& a) {
    store_each(to, [&](int k) {
      if constexpr (converts) {
        return narrow<Element>(a.element[k]);
      } else {
        return a.element[k];
      }
    });
  }
  template <class Element>
  TORCHOPT_HD static void stream(Element* to, const reg& a) {
    store(to, a);
  }
  template <class Remainder>
  TORCHOPT_HD static reg load_joined(const BFloat16* weight, const Remainder* remainder) {
    const auto weights = load_elements<2>(weight);
    const auto remainders = load_elements<sizeof(Remainder)>(remainder);
    return map([&](int k) {
      return join({weights.element[k]}, static_cast<Remainder>(remainders.element[k]));
    });
  }
  TORCHOPT_HD static void store_split(BFloat16* weight, int16_t* remainder, const reg& a) {
    store_parts(weight, remainder, [&](int k) { return split(a.element[k]); });
  }
  TORCHOPT_HD static void store_split(BFloat16* weight, int8_t* remainder, const reg& a) {
    store_parts(weight, remainder, [&](int k) { return split8(a.element[k]); });
  }
  template <class Code>
  TORCHOPT_HD static reg load_code(const Code* from) {
    const auto codes = load_elements<1>(from);
    return map([&](int k) {
      const auto code = static_cast<Code>(codes.element[k]);
      return SingleLane::load_code(&code);
    });
  }
  struct Random {
    RandomWords<ScalarWords> element[kWidth];
  };
  TORCHOPT_HD static void store_stochastic(BFloat16* to, const reg& a, const Random& random,
                                           Array array) {
    store_each(to, [&](int k) {
      return narrow_stochastic(a.element[k], random_bits_of(random.element[k], array));
    });
  }
  TORCHOPT_HD static void store_split_stochastic(BFloat16* weight, int8_t* remainder, const reg& a,
                                                 const Random& random) {
    store_parts(weight, remainder, [&](int k) {
      return split8_stochastic(a.element[k], random_bits_of(random.element[k], kParam));
    });
  }

  template <class Code>
  TORCHOPT_HD static void store_codes(Code* to, const reg& code) {
    store_each(to, [&](int k) {
      Code one;
      SingleLane::store_codes(&one, code.element[k]);
      return one;
    });
  }
  TORCHOPT_HD static reg fraction(const Random& random, Array array) {
    return map([&](int k) { return SingleLane::fraction(random.element[k], array); });
  }

  TORCHOPT_HD static reg set1(T a) {
    return map([&](int) { return a; });
  }
  TORCHOPT_HD static reg set1_in_register(T a) { return set1(a); }
  TORCHOPT_HD static reg add(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::add(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg sub(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::sub(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg mul(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::mul(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg fma(const reg& a, const reg& b, const reg& c) {
    return map([&](int k) { return SingleLane::fma(a.element[k], b.element[k], c.element[k]); });
  }
  TORCHOPT_HD static reg div(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::div(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg sqrt(const reg& a) {
    return map([&](int k) { return SingleLane::sqrt(a.element[k]); });
  }
  TORCHOPT_HD static reg sub_bits(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::sub_bits(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg neg(const reg& a) {
    return map([&](int k) { return SingleLane::neg(a.element[k]); });
  }
  // Returns the largest of all elements' magnitudes.
  TORCHOPT_HD static T largest(const reg& a) {
    T most{0};
    unrolled<kWidth>(
        [&](int k) { most = SingleLane::max_magnitude(most, SingleLane::abs(a.element[k])); });
    return most;
  }
  TORCHOPT_HD static reg min(const reg& a, const reg& b) {
    return map([&](int k) { return SingleLane::min(a.element[k], b.element[k]); });
  }
  TORCHOPT_HD static reg max_keep_nan(const reg& vmax, const reg& v) {
    return map([&](int k) { return SingleLane::max_keep_nan(vmax.element[k], v.element[k]); });
  }
  TORCHOPT_HD static reg canonical(const reg& a) {
    return map([&](int k) { return SingleLane::canonical(a.element[k]); });
  }

 private:
  template <int kSize>
  struct Elements {
    Bits<kSize> element[kWidth];
  };

  template <class Remainder, class F>
  TORCHOPT_HD static void store_parts(BFloat16* weight, Remainder* remainder, const F& f) {
    store_each(weight, [&](int k) { return f(k).weight; });
    store_each(remainder, [&](int k) { return f(k).remainder; });
  }
  template <class F>
  TORCHOPT_HD static reg map(const F& f) {
    reg a;
    unrolled<kWidth>([&](int k) { a.element[k] = f(k); });
    return a;
  }
  template <int kSize>
  TORCHOPT_HD static Elements<kSize> load_elements(const void* from) {
    Elements<kSize> all;
    constexpr int kBytes = access_bytes(kAccess, kSize);
    constexpr int kPerAccess = kBytes / kSize;
    unrolled<kWidth / kPerAccess>([&](int access) {
      const auto packed = load_bits<Packed<kBytes>>(static_cast<const char*>(from) +
                                                    offset(access * kPerAccess) * kSize);
      unrolled<kPerAccess>(
          [&](int k) { all.element[access * kPerAccess + k] = element_of<kSize>(packed, k); });
    });
    return all;
  }
  template <class Element, class F>
  TORCHOPT_HD static void store_each(Element* to, const F& f) {
    constexpr int kSize = sizeof(Element);
    constexpr int kBytes = access_bytes(kAccess, kSize);
    constexpr int kPerAccess = kBytes / kSize;
    unrolled<kWidth / kPerAccess>([&](int access) {
      Packed<kBytes> packed{};
      unrolled<kPerAccess>([&](int k) {
        set_element<kSize>(packed, k, bit_cast<Bits<kSize>>(f(access * kPerAccess + k)));
      });
      store_bits(to + offset(access * kPerAccess), packed);
    });
  }
};

}  // namespace
}  // namespace torchopt_ext

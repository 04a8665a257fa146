// The kinds of pass B: layouts with kernels of their own, of every algorithm.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "kernels/algorithms.h"

namespace torchopt_ext {
namespace {

constexpr int kKinds = [] {
  size_t count = 0;
  for_each_algorithm([&](auto a) { count += std::size(decltype(a)::kKinds); });
  return static_cast<int>(count);
}();

// The kinds of one algorithm after another. A Kind is an index of this table.
constexpr std::array<KindTraits, kKinds> kKindTraits = [] {
  std::array<KindTraits, kKinds> all{};
  size_t n = 0;
  for_each_algorithm([&](auto algorithm) {
    for (const KindTraits& traits : decltype(algorithm)::kKinds) {
      all[n] = traits;
      all[n++].algorithm = kNumberOf<decltype(algorithm)>;
    }
  });
  return all;
}();

constexpr const KindTraits& traits_of(Kind kind) { return kKindTraits[static_cast<size_t>(kind)]; }

// In a kernel, whose kind is a constant. CUDA calls no constexpr function of the host.
template <Kind kKind>
inline constexpr KindTraits kTraits =
    traits_of(kKind);  // NOLINT(modernize-avoid-c-style-cast): clang-tidy sees (Kind)3

template <Kind kKind>
using AlgorithmOf = std::tuple_element_t<static_cast<size_t>(kTraits<kKind>.algorithm), Algorithms>;

constexpr bool is_quantized(Kind kind) { return traits_of(kind).layout.state == DType::kInt8; }
constexpr bool is_double(Kind kind) { return traits_of(kind).layout.param == DType::kFloat64; }

// The type in which tensors of a kind are updated.
template <Kind kKind>
using ComputeType = std::conditional_t<is_double(kKind), double, float>;

// Calls f with the kind as a constant, to choose a kernel.
template <class F>
void with_kind(Kind kind, const F& f) {
  [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
    ((static_cast<int>(kind) == kNumbers ? f(std::integral_constant<Kind, Kind{kNumbers}>{})
                                         : void()),
     ...);
  }(std::make_integer_sequence<int, kKinds>{});
}

// The functions below return a layout and options as a kernel of kind kKind sees them.
template <Kind kKind>
[[gnu::always_inline]] TORCHOPT_HD inline Layout known_layout(const Layout& layout) {
  constexpr KindTraits kKnown = kTraits<kKind>;
  Layout layout_of_kind = kKnown.general ? layout : kKnown.layout;
  layout_of_kind.states = kKnown.layout.states | (kKnown.optional & layout.states);
  return layout_of_kind;
}
template <Kind kKind>
[[gnu::always_inline]] TORCHOPT_HD inline StepMode known_mode(const StepOptions& options,
                                                              const Layout& layout) {
  constexpr KindTraits kKnown = kTraits<kKind>;
  return {.write_back = kKnown.write_back && options.write_back_gradients,
          .rounds = kKnown.general ? rounds_randomly(options, layout) : kKnown.rounded};
}

// Returns the kind of a tensor. `whole_groups`: the back end may use kernels that need rows of
// whole groups of 8-bit moments.
inline Kind kind_of(Algorithm algorithm, const Layout& layout, const StepOptions& options,
                    bool whole_groups) {
  const bool rounds = rounds_randomly(options, layout);
  const bool quantized = layout.state == DType::kInt8;
  const auto fits = [&](const KindTraits& traits) {
    if (traits.algorithm != algorithm || (traits.layout.state == DType::kInt8) != quantized) {
      return false;
    }
    Layout usual = traits.layout;
    usual.states |= traits.optional & layout.states;
    return traits.general ||
           (layout == usual && rounds == traits.rounded && (whole_groups || !quantized) &&
            (traits.write_back || !options.write_back_gradients));
  };
  int kind = 0;
  while (!fits(kKindTraits[static_cast<size_t>(kind)])) {
    ++kind;
  }
  return static_cast<Kind>(kind);
}

}  // namespace
}  // namespace torchopt_ext

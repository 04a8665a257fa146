// The list of algorithms. An Algorithm is a position in it.
#pragma once

#include <span>
#include <tuple>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "kernels/muon.h"
#include "kernels/sgd.h"

namespace torchopt_ext {
namespace {

using Algorithms = std::tuple<Adam, Lion, Sgd, Muon>;
constexpr int kAlgorithms = std::tuple_size_v<Algorithms>;

template <class A, class... As>
constexpr Algorithm number_among(std::tuple<As...>* /*all*/) {
  int32_t number = 0;
  static_cast<void>(((std::is_same_v<A, As> || (++number, false)) || ...));
  return Algorithm{number};
}
template <class A>
constexpr Algorithm kNumberOf = number_among<A>(static_cast<Algorithms*>(nullptr));

// Calls f(A{}) for every algorithm A.
template <class F>
constexpr void for_each_algorithm(const F& f) {
  [&]<class... As>(std::tuple<As...>*) { (f(As{}), ...); }(static_cast<Algorithms*>(nullptr));
}

// Calls f(A{}) for one algorithm.
template <class F>
constexpr void with_algorithm(Algorithm algorithm, const F& f) {
  for_each_algorithm([&](auto a) {
    if (kNumberOf<decltype(a)> == algorithm) {
      f(a);
    }
  });
}

// A declaration as values.
struct Declaration {
  const char* name;
  std::span<const HyperSpec> hypers;
  std::span<const StateSpec> states;
  bool writes_direction;
};
inline Declaration declaration_of(Algorithm algorithm) {
  Declaration declaration{};
  with_algorithm(algorithm, [&](auto a) {
    using A = decltype(a);
    declaration = {A::kName, A::kHypers, A::kStates, kWritesDirection<A>};
  });
  return declaration;
}

// Returns the scalars of a tensor's step.
template <class T, class... As>
TORCHOPT_HD inline Scalars<T> scalars_among(std::tuple<As...>* /*all*/, Algorithm algorithm,
                                            const Hyper& hyper, int64_t step, double grad_factor) {
  Scalars<T> scalars{};
  (void)((kNumberOf<As> == algorithm &&
          (scalars = As::template scalars<T>(hyper, step, grad_factor), true)) ||
         ...);
  return scalars;
}
template <class T>
TORCHOPT_HD inline Scalars<T> scalars_of(Algorithm algorithm, const Hyper& hyper, int64_t step,
                                         double grad_factor) {
  return scalars_among<T>(static_cast<Algorithms*>(nullptr), algorithm, hyper, step, grad_factor);
}

}  // namespace
}  // namespace torchopt_ext

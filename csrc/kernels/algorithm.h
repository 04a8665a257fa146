// What an algorithm declares, in a header of its own such as adam.h: its hyperparameters, its
// states, its kinds of kernels, its scalars and its formula. Everything else follows from the
// declaration: loops, kernel tables, checks, the operator, and Python's options and state dicts.
#pragma once

#include "kernels/lane.h"
#include "kernels/tensor_work.h"

namespace torchopt_ext {

enum class Algorithm : int32_t {};  // the number in the list of algorithms.h

// The values that a hyperparameter may have. A NaN is out of every range.
enum class Range : int32_t {
  kAny,
  kNonNegative,
  kBelowOne,  // [0, 1)
  kFlag,      // 0 or 1
};

struct HyperSpec {
  const char* name;  // the operator's argument
  double usual = 0;  // the default
  Range range = Range::kAny;
  const char* invalid = "";   // names the value in the message about one out of range, as torch
  const char* key = nullptr;  // the key in a param group, if it is not the name
  int index = -1;             // the number in a group's tuple, such as betas
  bool may_lack = false;      // groups may lack the key, torch's do
  bool in_operator = true;    // false: decides about states only
};

// The hyperparameters of every algorithm, the first ones that it declares.
enum { kLr, kWeightDecay, kDecoupled, kMaximize, kCautious, kPeakLr, kCommonHypers };

// Decays a weight only where the direction does not point against it (arXiv:2510.12402).
inline constexpr HyperSpec kCautiousSpec{
    .name = "cautious_weight_decay", .range = Range::kFlag, .may_lack = true};
// The learning rate at which the weight decay is whole: at others it is multiplied by the ratio of
// the learning rates (AdamC, arXiv:2506.02285). 0: it does not follow.
inline constexpr HyperSpec kPeakLrSpec{.name = "decay_follows_lr",
                                       .range = Range::kNonNegative,
                                       .invalid = "decay_follows_lr value",
                                       .may_lack = true};

// One param group's hyperparameters, in the order of the declaration.
inline constexpr int kMostHypers = 11;
struct Hyper {
  double value[kMostHypers];
  TORCHOPT_HD double operator[](int i) const { return value[i]; }
};

struct StateSpec {
  const char* name;            // in a state dict
  const char* when = nullptr;  // the key of a group that asks for the state, if it is not 0
  // The state may have 8 bits, if the states before it may. As a root: 8 bits hold its root.
  bool is_moment = false;
  bool as_root = false;
  bool by_row = false;  // a float32 for each row of a parameter; no kernel reads it
};

// What the kernels of a kind know at compile time. Unless the kind is general, the layout and
// whether the step rounds are constants, and the compiler removes the branches on them.
struct KindTraits {
  Layout layout;  // of a general kind only whether the moments have 8 bits
  bool general = false;
  bool rounded = false;     // stochastically
  uint32_t optional = 0;    // the states that may be present besides the layout's
  bool write_back = false;  // also with StepOptions::write_back_gradients
  // CPU: whether the main loop takes two registers at once, as it should unless most arrays are
  // fp32 or fp64, and whether one register at a time follows it.
  bool pairs = true;
  bool single_registers = false;
  // CUDA: the elements that a thread takes at once: 16 bytes of the narrowest array, 4 elements
  // with branches on types. Blocks on a multiprocessor without and with tracking (cuda/pass_b.cu,
  // cuda/traced.cu).
  int width = 8;
  int blocks = 3;
  int traced_blocks = 2;
  Algorithm algorithm{};
};

// An update's scalars, rounded once to the compute type T. The algorithm names `value` and `flag`.
template <class T>
struct Scalars {
  T grad_factor, l2, decay, step_size;
  T value[5];
  bool maximize, has_l2, has_decay, cautious;
  bool flag[3];
};

// The scalars of one tensor's step in both compute types. Only the tensor's own type is used.
struct TensorScalars {
  Scalars<float> as_float;
  Scalars<double> as_double;
};

namespace {

template <class T>
TORCHOPT_HD inline const Scalars<T>& scalars_in(const TensorScalars& scalars) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return scalars.as_double;
  } else {
    return scalars.as_float;
  }
}

// Returns the scalars of every algorithm. The change of a weight is `step_size` times a direction.
template <class T>
TORCHOPT_HD inline Scalars<T> common_scalars(const Hyper& hyper, double grad_factor,
                                             double step_size) {
  using L = ScalarLane<double>;
  const bool decoupled = hyper[kDecoupled] != 0.0;
  double decay = decoupled ? L::mul(hyper[kLr], hyper[kWeightDecay]) : 0.0;
  if (hyper[kPeakLr] != 0.0) {
    decay = L::mul(decay, L::div(hyper[kLr], hyper[kPeakLr]));
  }
  const double l2 = decoupled ? 0.0 : hyper[kWeightDecay];
  Scalars<T> s{};
  s.grad_factor = static_cast<T>(grad_factor);
  s.l2 = static_cast<T>(l2);
  s.decay = static_cast<T>(decay);
  s.step_size = static_cast<T>(step_size);
  s.maximize = hyper[kMaximize] != 0.0;
  s.has_l2 = l2 != 0.0;
  s.has_decay = decay != 0.0;
  s.cautious = hyper[kCautious] != 0.0;
  return s;
}

// Returns m + w * (g - m), in the form that rounds less. `keeps` is 1 - w.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R moving_average(R m, R g, typename L::scalar w,
                                                           typename L::scalar keeps, bool small_w) {
  const R from_m = L::sub(g, m);
  return small_w ? L::add(m, L::mul(L::set1(w), from_m))
                 : L::sub(g, L::mul(L::set1(keeps), from_m));
}

// Returns -1, 0 or 1 as the sign of a; a NaN stays one. Two products make any number but 0 larger
// than 1.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R sign(R a) {
  using T = typename L::scalar;
  const R huge = L::set1(static_cast<T>(sizeof(T) == sizeof(float) ? 0x1p127 : 0x1p1023));
  const R one = L::set1(T{1});
  const R below = L::min(one, L::mul(L::mul(a, huge), huge));
  return L::neg(L::min(one, L::neg(below)));
}

// Returns 0 where the direction d and the weight p have opposite signs, 1 elsewhere.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline R decays(R d, R p) {
  using T = typename L::scalar;
  return L::add(L::set1(T{1}), L::min(sign<L>(L::mul(sign<L>(d), p)), L::set1(T{0})));
}

// Whether the step of an algorithm writes the direction to kParam, and another step applies it.
template <class A>
inline constexpr bool kWritesDirection = requires { A::kWritesDirection; };

// Updates one register of elements and makes NaNs canonical. The conditions depend only on scalars
// and layouts, so the branch predictor makes them free.
template <class A, class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline void update_registers(
    const Scalars<typename L::scalar>& s, R& p, R g, R (&state)[kMostStates], uint32_t states) {
  g = L::mul(g, L::set1(s.grad_factor));
  if (s.maximize) {
    g = L::neg(g);
  }
  if (s.has_l2) {
    g = L::add(g, L::mul(L::set1(s.l2), p));
  }
  const R d = A::template direction<L>(s, g, state, states);
  if constexpr (kWritesDirection<A>) {
    p = L::canonical(d);
    return;
  }
  R change = L::mul(L::set1(s.step_size), d);
  if (s.has_decay) {
    R decay = L::mul(L::set1(s.decay), p);
    // Outside the loop of plain decay, which takes 1 % longer with these lines in it.
    if (s.cautious) [[unlikely]] {
      decay = L::mul(decay, decays<L>(d, p));
    }
    change = L::add(decay, change);
  }
  p = L::canonical(L::sub(p, change));
}

}  // namespace
}  // namespace torchopt_ext

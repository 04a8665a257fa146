// SGD with momentum, dampening and Nesterov's momentum, as torch.optim.SGD defines them.
// docs/numerics.md section 2.
#pragma once

#include "kernels/algorithm.h"

namespace torchopt_ext {
namespace {

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr const char* kOperator = "sgd_";

  enum { kMomentum = kCommonHypers, kDampening, kNesterov };
  static constexpr HyperSpec kHypers[] = {
      {"lr", 1e-3, Range::kAny, "learning rate"},
      {"weight_decay", 0.0, Range::kNonNegative, "weight_decay value"},
      {.name = "decoupled_weight_decay", .range = Range::kFlag, .may_lack = true},
      {.name = "maximize", .range = Range::kFlag},
      kCautiousSpec,
      kPeakLrSpec,
      {"momentum", 0.0, Range::kNonNegative, "momentum value"},
      {"dampening", 0.0, Range::kAny, "dampening value"},
      {.name = "nesterov", .range = Range::kFlag},
  };

  static constexpr uint32_t kBuffer = 1;
  static constexpr StateSpec kStates[] = {
      {.name = "momentum_buffer", .when = "momentum", .is_moment = true},
  };

  static constexpr KindTraits kKinds[] = {
      {.layout = {}, .optional = kBuffer, .pairs = false, .width = 4, .blocks = 4},
      {.layout = {DType::kFloat64, DType::kFloat64, DType::kFloat64},
       .optional = kBuffer,
       .write_back = true,
       .width = 2,
       .blocks = 4},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
       .optional = kBuffer,
       .blocks = 4},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kFloat32},
       .optional = kBuffer,
       .pairs = false,
       .blocks = 4},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kRemainder},
       .optional = kBuffer,
       .blocks = 4},
      {.layout = {}, .general = true, .optional = kBuffer, .write_back = true, .width = 4},
      {.layout = {.state = DType::kInt8, .states = kBuffer},
       .general = true,
       .write_back = true,
       .blocks = 2,
       .traced_blocks = 1},
  };

  static const char* problem(const Hyper& hyper) {
    const bool fits =
        hyper[kNesterov] == 0.0 || (hyper[kMomentum] > 0.0 && hyper[kDampening] == 0.0);
    return fits ? nullptr : "Nesterov momentum requires a momentum and zero dampening";
  }

  // Indices of Scalars::value and flag.
  enum { kKeeps, kW, kAhead };
  enum { kLooksAhead };

  template <class T>
  TORCHOPT_HD static Scalars<T> scalars(const Hyper& hyper, int64_t step, double grad_factor) {
    Scalars<T> s = common_scalars<T>(hyper, grad_factor, hyper[kLr]);
    // The buffer begins as the first gradient: its former value then counts for nothing.
    const bool begins = step == 1;
    s.value[kKeeps] = static_cast<T>(begins ? 0.0 : hyper[kMomentum]);
    s.value[kW] = static_cast<T>(begins ? 1.0 : ScalarLane<double>::sub(1.0, hyper[kDampening]));
    s.value[kAhead] = static_cast<T>(hyper[kMomentum]);
    s.flag[kLooksAhead] = hyper[kNesterov] != 0.0;
    return s;
  }

  template <class L, class R = typename L::reg>
  [[gnu::always_inline]] TORCHOPT_HD static R direction(const Scalars<typename L::scalar>& s, R g,
                                                        R (&state)[kMostStates], uint32_t states) {
    if ((states & kBuffer) == 0) {
      return g;
    }
    R& buffer = state[0];
    buffer = L::canonical(
        L::add(L::mul(L::set1(s.value[kKeeps]), buffer), L::mul(L::set1(s.value[kW]), g)));
    return s.flag[kLooksAhead] ? L::add(g, L::mul(L::set1(s.value[kAhead]), buffer)) : buffer;
  }
};

}  // namespace
}  // namespace torchopt_ext

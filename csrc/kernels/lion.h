// Lion (Chen et al., arXiv:2302.06675): the sign of a moving average. docs/numerics.md section 2.
#pragma once

#include "kernels/algorithm.h"

namespace torchopt_ext {
namespace {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr const char* kOperator = "lion_";

  enum { kBeta1 = kCommonHypers, kBeta2 };
  static constexpr HyperSpec kHypers[] = {
      {"lr", 1e-4, Range::kAny, "learning rate"},
      {"weight_decay", 0.0, Range::kNonNegative, "weight_decay value"},
      {.name = "decoupled_weight_decay", .usual = 1, .range = Range::kFlag, .may_lack = true},
      {.name = "maximize", .range = Range::kFlag},
      kCautiousSpec,
      kPeakLrSpec,
      {"beta1", 0.9, Range::kBelowOne, "beta parameter at index 0", "betas", 0},
      {"beta2", 0.99, Range::kBelowOne, "beta parameter at index 1", "betas", 1},
  };

  static constexpr StateSpec kStates[] = {{.name = "exp_avg", .is_moment = true}};

  static constexpr KindTraits kKinds[] = {
      {.layout = {.states = 1}, .pairs = false, .width = 4, .blocks = 4},
      {.layout = {DType::kFloat64, DType::kFloat64, DType::kFloat64, Master::kNone, 1},
       .write_back = true,
       .width = 2,
       .blocks = 3},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, Master::kNone, 1},
       .blocks = 4},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kFloat32, 1},
       .pairs = false,
       .blocks = 4},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kRemainder, 1},
       .blocks = 4},
      {.layout = {.states = 1}, .general = true, .write_back = true, .width = 4},
      {.layout = {.state = DType::kInt8, .states = 1},
       .general = true,
       .write_back = true,
       .blocks = 2,
       .traced_blocks = 1},
  };

  // Indices of Scalars::value and flag: the weights of the direction's average, then of the
  // state's.
  enum { kKeeps1, kKeeps2, kW1, kW2 };
  enum { kSmallW1, kSmallW2 };

  template <class T>
  TORCHOPT_HD static Scalars<T> scalars(const Hyper& hyper, int64_t /*step*/, double grad_factor) {
    using L = ScalarLane<double>;
    const double w1 = L::sub(1.0, hyper[kBeta1]);
    const double w2 = L::sub(1.0, hyper[kBeta2]);
    Scalars<T> s = common_scalars<T>(hyper, grad_factor, hyper[kLr]);
    s.value[kKeeps1] = static_cast<T>(hyper[kBeta1]);
    s.value[kKeeps2] = static_cast<T>(hyper[kBeta2]);
    s.value[kW1] = static_cast<T>(w1);
    s.value[kW2] = static_cast<T>(w2);
    s.flag[kSmallW1] = w1 < 0.5;
    s.flag[kSmallW2] = w2 < 0.5;
    return s;
  }

  template <class L, class R = typename L::reg>
  [[gnu::always_inline]] TORCHOPT_HD static R direction(const Scalars<typename L::scalar>& s, R g,
                                                        R (&state)[kMostStates],
                                                        uint32_t /*states*/) {
    R& m = state[0];
    const R c = moving_average<L>(m, g, s.value[kW1], s.value[kKeeps1], s.flag[kSmallW1]);
    m = L::canonical(moving_average<L>(m, g, s.value[kW2], s.value[kKeeps2], s.flag[kSmallW2]));
    return sign<L>(c);
  }
};

}  // namespace
}  // namespace torchopt_ext

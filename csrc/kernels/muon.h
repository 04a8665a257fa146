// Muon (Jordan et al., kellerjordan.github.io/posts/muon; torch/optim/_muon.py): the momentum of a
// matrix, orthogonalized. A step has three stages: the kernels of this header average the momentum
// and write the direction; plan/orthogonal_update.h orthogonalizes it; the kernels of Sgd without a
// state, with the scalars below, apply it to the weights. docs/numerics.md section 2.
#pragma once

#include "kernels/algorithm.h"

namespace torchopt_ext {
namespace {

struct Muon {
  static constexpr const char* kName = "muon";
  static constexpr const char* kOperator = "muon_";
  static constexpr bool kWritesDirection = true;

  enum { kMomentum = kCommonHypers, kNesterov, kBeta2, kDeclared };
  static constexpr HyperSpec kHypers[] = {
      {"lr", 1e-3, Range::kAny, "learning rate"},
      {"weight_decay", 0.1, Range::kNonNegative, "weight_decay value"},
      {.name = "decoupled_weight_decay", .usual = 1, .range = Range::kFlag, .may_lack = true},
      {.name = "maximize", .range = Range::kFlag, .may_lack = true},
      kCautiousSpec,
      kPeakLrSpec,
      {"momentum", 0.95, Range::kNonNegative, "momentum value"},
      {.name = "nesterov", .usual = 1, .range = Range::kFlag},
      {.name = "beta2", .range = Range::kBelowOne, .invalid = "beta2 value", .may_lack = true},
  };
  // Set by the plan: the factor of the learning rate of a matrix's shape, in the stage that applies
  // the direction; 0 before it.
  static constexpr int kLrScale = kDeclared;

  // The latter is NorMuon's (plan/normalize_rows.h).
  enum { kMomentumBuffer, kSecondMomentum };
  static constexpr StateSpec kStates[] = {
      {.name = "momentum_buffer", .is_moment = true},
      {.name = "second_momentum_buffer", .when = "beta2", .by_row = true},
  };

  // kParam is the direction, which has no master.
  static constexpr KindTraits kKinds[] = {
      {.layout = {.states = 1}, .pairs = false, .width = 4, .blocks = 4},
      {.layout = {DType::kFloat64, DType::kFloat64, DType::kFloat64, Master::kNone, 1},
       .write_back = true,
       .width = 2,
       .blocks = 3},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kNone, 1},
       .blocks = 4},
      {.layout = {.states = 1}, .general = true, .write_back = true, .width = 4},
      {.layout = {.state = DType::kInt8, .states = 1},
       .general = true,
       .write_back = true,
       .blocks = 2,
       .traced_blocks = 1},
  };

  static const char* problem(const Hyper& hyper) {
    return hyper[kDecoupled] != 0.0 ? nullptr : "the weight decay of Muon is always decoupled";
  }

  // Indices of Scalars::value and flag: the weights of the momentum's average, then of Nesterov's.
  enum { kKeeps, kW, kKeepsAhead, kAhead };
  enum { kSmallW, kSmallAhead, kLooksAhead };

  template <class T>
  TORCHOPT_HD static Scalars<T> scalars(const Hyper& hyper, int64_t /*step*/, double grad_factor) {
    using L = ScalarLane<double>;
    const bool applies = hyper[kLrScale] != 0.0;
    const double w = L::sub(1.0, hyper[kMomentum]);
    Scalars<T> s =
        common_scalars<T>(hyper, applies ? 1.0 : grad_factor, L::mul(hyper[kLr], hyper[kLrScale]));
    s.maximize = s.maximize && !applies;
    s.value[kKeeps] = s.value[kAhead] = static_cast<T>(hyper[kMomentum]);
    s.value[kW] = s.value[kKeepsAhead] = static_cast<T>(w);
    s.flag[kSmallW] = w < 0.5;
    s.flag[kSmallAhead] = hyper[kMomentum] < 0.5;
    s.flag[kLooksAhead] = hyper[kNesterov] != 0.0;
    return s;
  }

  template <class L, class R = typename L::reg>
  [[gnu::always_inline]] TORCHOPT_HD static R direction(const Scalars<typename L::scalar>& s, R g,
                                                        R (&state)[kMostStates],
                                                        uint32_t /*states*/) {
    R& m = state[0];
    m = L::canonical(moving_average<L>(m, g, s.value[kW], s.value[kKeeps], s.flag[kSmallW]));
    return s.flag[kLooksAhead]
               ? moving_average<L>(g, m, s.value[kAhead], s.value[kKeepsAhead], s.flag[kSmallAhead])
               : m;
  }
};

}  // namespace
}  // namespace torchopt_ext

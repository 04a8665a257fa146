// Adam and AdamW: docs/numerics.md section 2.
#pragma once

#include "kernels/algorithm.h"

namespace torchopt_ext {
namespace {

// Returns base**exponent by repeated squaring: libm's pow differs between hosts and CUDA.
TORCHOPT_HD inline double pow_by_squaring(double base, int64_t exponent) {
  using L = ScalarLane<double>;
  double result = 1.0;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) {
      result = L::mul(result, base);
    }
    base = L::mul(base, base);
  }
  return result;
}

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr const char* kOperator = "adam_";

  // The decay is decoupled in AdamW, and otherwise added to the gradient.
  enum { kBeta1 = kCommonHypers, kBeta2, kEps, kBiasCorrection, kAmsgrad };
  static constexpr HyperSpec kHypers[] = {
      {"lr", 1e-3, Range::kAny, "learning rate"},
      {"weight_decay", 0.0, Range::kNonNegative, "weight_decay value"},
      {.name = "decoupled_weight_decay", .range = Range::kFlag},
      {.name = "maximize", .range = Range::kFlag},
      kCautiousSpec,
      kPeakLrSpec,
      {"beta1", 0.9, Range::kBelowOne, "beta parameter at index 0", "betas", 0},
      {"beta2", 0.999, Range::kBelowOne, "beta parameter at index 1", "betas", 1},
      {"eps", 1e-8, Range::kNonNegative, "epsilon value"},
      {.name = "bias_correction", .usual = 1, .range = Range::kFlag, .may_lack = true},
      {.name = "amsgrad", .range = Range::kFlag, .in_operator = false},
  };

  enum { kExpAvg, kExpAvgSq, kMaxExpAvgSq };
  static constexpr StateSpec kStates[] = {
      {.name = "exp_avg", .is_moment = true},
      {.name = "exp_avg_sq", .is_moment = true, .as_root = true},
      {.name = "max_exp_avg_sq", .when = "amsgrad"},
  };

  // Layouts in which large models are trained. Branches on types would take a third of the time
  // with 16-bit moments and a tenth with fp32 moments.
  static constexpr uint32_t kMoments = 0b011;
  static constexpr uint32_t kMax = 0b100;
  static constexpr KindTraits kKinds[] = {
      {.layout = {.states = kMoments},
       .optional = kMax,
       .pairs = false,
       .width = 4,
       .blocks = 4,
       .traced_blocks = 3},
      {.layout = {DType::kFloat64, DType::kFloat64, DType::kFloat64, Master::kNone, kMoments},
       .optional = kMax,
       .write_back = true,
       .width = 2,
       .blocks = 2},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, Master::kNone, kMoments},
       .single_registers = true,
       .blocks = 4,
       .traced_blocks = 3},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kFloat32, kMoments},
       .pairs = false,
       .blocks = 4,
       .traced_blocks = 3},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kRemainder,
                  kMoments},
       .blocks = 4,
       .traced_blocks = 3},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, Master::kNone, kMoments},
       .rounded = true},
      {.layout = {.states = kMoments},
       .general = true,
       .optional = kMax,
       .write_back = true,
       .width = 4},
      {.layout = {DType::kFloat32, DType::kFloat32, DType::kInt8, Master::kNone, kMoments}},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8, Master::kNone, kMoments}},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8, Master::kNone, kMoments},
       .rounded = true},
      {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8, Master::kRemainder8, kMoments}},
      {.layout = {.state = DType::kInt8, .states = kMoments},
       .general = true,
       .write_back = true,
       .blocks = 2,
       .traced_blocks = 1},
  };

  // Indices of Scalars::value and flag.
  enum { kKeeps1, kKeeps2, kW1, kW2, kEpsHat };
  enum { kSmallW1, kSmallW2 };

  template <class T>
  TORCHOPT_HD static Scalars<T> scalars(const Hyper& hyper, int64_t step, double grad_factor) {
    using L = ScalarLane<double>;
    const auto bias_correction = [&](double beta) {
      return hyper[kBiasCorrection] != 0.0 ? L::sub(1.0, pow_by_squaring(beta, step)) : 1.0;
    };
    const double bias_correction1 = bias_correction(hyper[kBeta1]);
    const double bias_correction2 = bias_correction(hyper[kBeta2]);
    const double root = L::sqrt(bias_correction2);
    const double w1 = L::sub(1.0, hyper[kBeta1]);
    const double w2 = L::sub(1.0, hyper[kBeta2]);
    Scalars<T> s =
        common_scalars<T>(hyper, grad_factor, L::mul(L::div(hyper[kLr], bias_correction1), root));
    s.value[kKeeps1] = static_cast<T>(hyper[kBeta1]);
    s.value[kKeeps2] = static_cast<T>(hyper[kBeta2]);
    s.value[kW1] = static_cast<T>(w1);
    s.value[kW2] = static_cast<T>(w2);
    s.value[kEpsHat] = static_cast<T>(L::mul(hyper[kEps], root));
    s.flag[kSmallW1] = w1 < 0.5;
    s.flag[kSmallW2] = w2 < 0.5;
    return s;
  }

  // Updates the moments by the gradient g and returns the direction of the step.
  template <class L, class R = typename L::reg>
  [[gnu::always_inline]] TORCHOPT_HD static R direction(const Scalars<typename L::scalar>& s, R g,
                                                        R (&state)[kMostStates], uint32_t states) {
    R& m = state[kExpAvg];
    R& v = state[kExpAvgSq];
    m = moving_average<L>(m, g, s.value[kW1], s.value[kKeeps1], s.flag[kSmallW1]);
    const R w2 = L::set1(s.value[kW2]);
    const R weighted_square = L::mul(L::mul(w2, g), g);
    // Once v has overflowed, v - w2*v would be infinity - infinity; the bound keeps v infinite.
    const R forgotten = L::min(L::mul(w2, v), L::set1(largest_finite<typename L::scalar>));
    v = s.flag[kSmallW2] ? L::add(v, L::sub(weighted_square, forgotten))
                         : L::add(weighted_square, L::mul(L::set1(s.value[kKeeps2]), v));
    m = L::canonical(m);
    v = L::canonical(v);
    R d = v;
    if ((states & kMax) != 0) {
      d = state[kMaxExpAvgSq] = L::canonical(L::max_keep_nan(state[kMaxExpAvgSq], v));
    }
    return L::div(m, L::add(L::sqrt(d), L::set1(s.value[kEpsHat])));
  }
};

}  // namespace
}  // namespace torchopt_ext

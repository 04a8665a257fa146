// The Adam and AdamW update: docs/numerics.md section 2. One written formula, a template over the
// lane type (lane.h), shared by every CPU build and by the CUDA kernel.
#pragma once

#include "kernels/lane.h"

namespace torchopt_ext {

// One param group's arguments.
struct AdamHyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;  // AdamW; otherwise the decay is added to the gradient (Adam)
  bool maximize;
  bool bias_correction = true;
};

// The update's scalars, rounded once to the compute type T.
template <class T>
struct AdamScalars {
  T grad_factor, l2, beta1, beta2, w1, w2, eps_hat, decay, step_size;
  bool maximize, has_l2, has_decay, small_w1, small_w2;
};

// The scalars of one tensor's step in both compute types. Only the tensor's own type is used.
struct TensorScalars {
  AdamScalars<float> as_float;
  AdamScalars<double> as_double;
};

namespace {

template <class T>
TORCHOPT_HD inline const AdamScalars<T>& scalars_in(const TensorScalars& scalars) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return scalars.as_double;
  } else {
    return scalars.as_float;
  }
}

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

template <class T>
TORCHOPT_HD inline AdamScalars<T> adam_scalars(const AdamHyper& hyper, int64_t step,
                                               double grad_factor) {
  using L = ScalarLane<double>;
  const auto bias_correction = [&](double beta) {
    return hyper.bias_correction ? L::sub(1.0, pow_by_squaring(beta, step)) : 1.0;
  };
  const double bias_correction1 = bias_correction(hyper.beta1);
  const double bias_correction2 = bias_correction(hyper.beta2);
  const double root = L::sqrt(bias_correction2);
  const double w1 = L::sub(1.0, hyper.beta1);
  const double w2 = L::sub(1.0, hyper.beta2);
  const double decay = hyper.decoupled_weight_decay ? L::mul(hyper.lr, hyper.weight_decay) : 0.0;
  const double l2 = hyper.decoupled_weight_decay ? 0.0 : hyper.weight_decay;
  AdamScalars<T> s;
  s.grad_factor = static_cast<T>(grad_factor);
  s.l2 = static_cast<T>(l2);
  s.beta1 = static_cast<T>(hyper.beta1);
  s.beta2 = static_cast<T>(hyper.beta2);
  s.w1 = static_cast<T>(w1);
  s.w2 = static_cast<T>(w2);
  s.eps_hat = static_cast<T>(L::mul(hyper.eps, root));
  s.decay = static_cast<T>(decay);
  s.step_size = static_cast<T>(L::mul(L::div(hyper.lr, bias_correction1), root));
  s.maximize = hyper.maximize;
  s.has_l2 = l2 != 0.0;
  s.has_decay = decay != 0.0;
  s.small_w1 = w1 < 0.5;
  s.small_w2 = w2 < 0.5;
  return s;
}

// Updates one register of elements and makes NaNs canonical. The conditions depend only on scalars,
// so the branch predictor makes them free.
template <class L, class R = typename L::reg>
[[gnu::always_inline]] TORCHOPT_HD inline void adam_registers(
    const AdamScalars<typename L::scalar>& s, R& p, R g, R& m, R& v, R& max_exp_avg_sq,
    bool amsgrad) {
  using T = typename L::scalar;
  g = L::mul(g, L::set1(s.grad_factor));
  if (s.maximize) {
    g = L::neg(g);
  }
  if (s.has_l2) {
    g = L::add(g, L::mul(L::set1(s.l2), p));
  }
  const R from_m = L::sub(g, m);
  m = s.small_w1 ? L::add(m, L::mul(L::set1(s.w1), from_m))
                 : L::sub(g, L::mul(L::set1(s.beta1), from_m));
  const R weighted_square = L::mul(L::mul(L::set1(s.w2), g), g);
  // Once v has overflowed, v - w2*v would be infinity - infinity; the bound keeps v infinite.
  const R forgotten = L::min(L::mul(L::set1(s.w2), v), L::set1(largest_finite<T>));
  v = s.small_w2 ? L::add(v, L::sub(weighted_square, forgotten))
                 : L::add(weighted_square, L::mul(L::set1(s.beta2), v));
  m = L::canonical(m);
  v = L::canonical(v);
  R d = v;
  if (amsgrad) {
    d = max_exp_avg_sq = L::canonical(L::max_keep_nan(max_exp_avg_sq, v));
  }
  const R u = L::div(m, L::add(L::sqrt(d), L::set1(s.eps_hat)));
  R change = L::mul(L::set1(s.step_size), u);
  if (s.has_decay) {
    change = L::add(L::mul(L::set1(s.decay), p), change);
  }
  p = L::canonical(L::sub(p, change));
}

}  // namespace
}  // namespace torchopt_ext

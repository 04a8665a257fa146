// The control block: what pass A and pass B of a step agree on. One small float64 tensor per
// device has this layout, so no value has to travel to the host during a step. docs/numerics.md
// section 4.
#pragma once

#include "kernels/exact_accumulator.h"
#include "kernels/lane.h"

namespace torchopt_ext {

// All fields are doubles, counts and flags included: one tensor, exact up to 2**53.
struct Control {
  // Settings.
  double max_grad_norm;   // 0 or less: no clipping
  double skip_nonfinite;  // 1: a step with a non-finite gradient is skipped
  // The last decision.
  double grad_norm;    // of the unscaled gradients; 0 when no pass A was asked for
  double clip_factor;  // what clipping multiplies gradients with
  double grad_factor;  // clip_factor / loss scale: what pass B multiplies gradients with
  double found_inf;    // 1: a gradient was not finite
  double skip;         // 1: pass B changes nothing
  // Counters.
  double steps;          // decisions made, skipped ones included
  double skipped_steps;  // of them, skipped
};
inline constexpr const char* kControlFields[] = {
    "max_grad_norm", "skip_nonfinite", "grad_norm", "clip_factor",  "grad_factor",
    "found_inf",     "skip",           "steps",     "skipped_steps"};
inline constexpr int kControlSize = sizeof(Control) / sizeof(double);
static_assert(sizeof(kControlFields) / sizeof(kControlFields[0]) == kControlSize);

namespace {

// grad_scale and found_inf are what torch.amp.GradScaler hands to an optimizer, or null.
TORCHOPT_HD inline void control_update(Control& control, const ExactAccumulator& accumulator,
                                       const float* grad_scale, const float* found_inf) {
  using L = ScalarLane<double>;
  const double scale = grad_scale != nullptr ? static_cast<double>(*grad_scale) : 1.0;
  const bool scaler_says_skip = found_inf != nullptr && *found_inf != 0.0f;
  const double total = accumulator_total(accumulator);
  control.grad_norm = L::div(L::sqrt(total), scale);
  control.clip_factor = 1.0;
  if (control.max_grad_norm > 0.0) {
    const double factor = L::div(control.max_grad_norm, L::add(control.grad_norm, 1e-6));
    control.clip_factor = factor > 1.0 ? 1.0 : factor;  // a NaN stays
  }
  control.grad_factor = L::mul(control.clip_factor, L::div(1.0, scale));
  const bool nonfinite = !(total <= largest_finite<double>);
  const bool skip = scaler_says_skip || (nonfinite && control.skip_nonfinite != 0.0);
  control.found_inf = nonfinite || scaler_says_skip ? 1.0 : 0.0;
  control.skip = skip ? 1.0 : 0.0;
  control.steps = L::add(control.steps, 1.0);
  control.skipped_steps = L::add(control.skipped_steps, control.skip);
}

}  // namespace
}  // namespace torchopt_ext

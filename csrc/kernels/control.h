// The control block: what pass A and pass B of a step agree on. One small float64 tensor per
// device has this layout, so no value has to travel to the host during a step. docs/numerics.md
// section 4.
#pragma once

#include "kernels/lane.h"
#include "kernels/schedule.h"

namespace torchopt_ext {

// All fields are doubles, counts and flags included: one tensor, exact up to 2**53.
struct Control {
  // Settings.
  double max_grad_norm;   // 0 or less: no clipping
  double skip_nonfinite;  // 1: a step with a non-finite gradient is skipped
  // The last decision.
  double grad_norm;    // of the unscaled gradients; 0 without pass A, which the classes show as NaN
  double clip_factor;  // what clipping multiplies gradients with
  double grad_factor;  // clip_factor / loss scale: what pass B multiplies gradients with
  double found_inf;    // 1: a gradient was not finite
  double skip;         // 1: pass B changes nothing
  double grad_scale;   // what gradients in memory are too large by
  // Counters.
  double steps;          // decisions made, skipped ones included
  double skipped_steps;  // of them, skipped
  // Loss scale: its state, then its settings (loss_scale_update).
  double loss_scale;          // what gradients are too large by, unless a scaler's tensor says it
  double growth_tracker;      // good steps since the scale last changed
  double hysteresis_tracker;  // overflows that count against hysteresis
  double growth_factor;
  double backoff_factor;
  double growth_interval;         // good steps until the scale grows; 0: the scale stays
  double hysteresis;              // overflows until the scale backs off; 0 and 1: at the first
  double consecutive_hysteresis;  // 1: a good step forgives overflows; 0: only growth does
  double min_scale;               // 0: none
  double max_scale;               // 0: none
  // Schedule of the learning rate (schedule.h), counted in steps that were not skipped.
  double lr_factor;  // what pass B multiplies the learning rate with
  double scheduled;  // 1: lr_factor follows the schedule; 0: it stays
  double warmup_steps;
  double stable_steps;
  double decay_steps;
  double decay_type;  // as DecayType
  double min_lr_factor;
  double schedule_generation;
};
inline constexpr int kControlSize = sizeof(Control) / sizeof(double);

namespace {

// After a step: back off on overflow, grow after enough good steps. The scale is rounded to float,
// as torch.amp's is, and never grows to infinity. With hysteresis 1 this is torch.amp's rule
// (aten/src/ATen/native/cuda/AmpKernels.cu); otherwise that of Megatron, DeepSpeed and InternEvo,
// or with `consecutive_hysteresis` apex's, which a good step resets. Unlike theirs it does not back
// off to numbers whose reciprocals a float does not hold, and so to 0.
TORCHOPT_HD inline void loss_scale_update(Control& control, bool overflow) {
  using L = ScalarLane<double>;
  const auto rounded = [](double x) { return static_cast<double>(static_cast<float>(x)); };
  if (overflow) {
    control.growth_tracker = 0.0;
    control.hysteresis_tracker = L::add(control.hysteresis_tracker, 1.0);
    if (control.hysteresis_tracker >= control.hysteresis) {
      constexpr double kSmallestNormal = 0x1p-126;
      const double least =
          control.min_scale > kSmallestNormal ? control.min_scale : kSmallestNormal;
      const double scale = rounded(L::mul(control.loss_scale, control.backoff_factor));
      control.loss_scale = scale < least ? least : scale;
    }
    return;
  }
  if (control.consecutive_hysteresis != 0.0) {
    control.hysteresis_tracker = 0.0;
  }
  control.growth_tracker = L::add(control.growth_tracker, 1.0);
  if (control.growth_interval > 0.0 && control.growth_tracker >= control.growth_interval) {
    control.growth_tracker = 0.0;
    control.hysteresis_tracker = 0.0;
    double scale = rounded(L::mul(control.loss_scale, control.growth_factor));
    if (control.max_scale > 0.0 && scale > control.max_scale) {
      scale = control.max_scale;
    }
    if (scale <= static_cast<double>(largest_finite<float>)) {
      control.loss_scale = scale;
    }
  }
}

// The same for a scale that a scaler keeps in a float of its own.
TORCHOPT_HD inline void scaler_update(Control& control, bool overflow, float& scale) {
  control.loss_scale = static_cast<double>(scale);
  loss_scale_update(control, overflow);
  scale = static_cast<float>(control.loss_scale);
}

TORCHOPT_HD inline double scheduled_lr_factor(const Control& control) {
  const Schedule schedule{bounded_steps(control.warmup_steps),
                          bounded_steps(control.stable_steps),
                          bounded_steps(control.decay_steps),
                          static_cast<DecayType>(bounded_steps(control.decay_type)),
                          control.min_lr_factor,
                          static_cast<int>(bounded_steps(control.schedule_generation))};
  return lr_factor(schedule, bounded_steps(control.steps - control.skipped_steps));
}

// `total` is the accumulator's. grad_scale and found_inf are what a gradient scaler hands to an
// optimizer, or null. Without grad_scale the block's own loss scale counts, and follows the
// overflows where it is dynamic.
TORCHOPT_HD inline void control_update(Control& control, double total, const float* grad_scale,
                                       const float* found_inf) {
  using L = ScalarLane<double>;
  const double scale =
      grad_scale != nullptr ? static_cast<double>(*grad_scale) : control.loss_scale;
  control.grad_scale = scale;
  const bool scaler_says_skip = found_inf != nullptr && *found_inf != 0.0f;
  control.grad_norm = L::div(L::sqrt(total), scale);
  control.clip_factor = 1.0;
  if (control.max_grad_norm > 0.0) {
    const double factor = L::div(control.max_grad_norm, L::add(control.grad_norm, 1e-6));
    control.clip_factor = factor > 1.0 ? 1.0 : factor;  // a NaN stays
  }
  const double inverse = L::div(1.0, scale);
  control.grad_factor = L::mul(control.clip_factor, inverse);
  if (control.scheduled != 0.0) {
    control.lr_factor = scheduled_lr_factor(control);
  }
  // Finite gradients times an infinity would be infinities.
  const bool unscales = inverse <= static_cast<double>(largest_finite<float>);
  const bool nonfinite = !(total <= largest_finite<double>) || !unscales;
  const bool skip = scaler_says_skip || (nonfinite && control.skip_nonfinite != 0.0) ||
                    (!unscales && grad_scale != nullptr);
  control.found_inf = nonfinite || scaler_says_skip ? 1.0 : 0.0;
  control.skip = skip ? 1.0 : 0.0;
  control.steps = L::add(control.steps, 1.0);
  control.skipped_steps = L::add(control.skipped_steps, control.skip);
  if (grad_scale == nullptr && control.growth_interval > 0.0) {
    loss_scale_update(control, nonfinite || scaler_says_skip);
  }
}

}  // namespace
}  // namespace torchopt_ext

// The control block: the values that pass A and pass B of a step share. One small float64 tensor
// per device has this layout, so no value has to travel to the host during a step. docs/numerics.md
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
  double grad_norm;    // of the unscaled gradients; 0 without pass A, shown as NaN by the classes
  double clip_factor;  // the factor that clips gradients
  double grad_factor;  // clip_factor / grad_scale: the factor by which pass B multiplies gradients
  double found_inf;    // 1: a gradient or 1 / scale was not finite, or a scaler said so
  double skip;         // 1: pass B changes nothing
  double grad_scale;   // the loss scale of the gradients in memory
  // Counters.
  double steps;          // decisions made, skipped steps included
  double skipped_steps;  // decisions to skip
  // Loss scale: its state, then its settings (loss_scale_update).
  double loss_scale;          // the scale of gradients, unless a scaler's tensor gives another
  double growth_tracker;      // good steps since the scale last changed
  double hysteresis_tracker;  // overflows that count against hysteresis
  double growth_factor;
  double backoff_factor;
  double growth_interval;  // good steps until the scale grows; 0: the scale stays
  double hysteresis;       // overflows until the scale backs off; 0 and 1: at the first
  double min_scale;        // 0: no minimum
  double max_scale;        // 0: no maximum
  // Schedule of the learning rate (schedule.h), counted in steps that were not skipped.
  double lr_factor;  // the factor by which pass B multiplies the learning rate
  double scheduled;  // 1: lr_factor follows the schedule; 0: it stays
  double warmup_steps;
  double stable_steps;
  double decay_steps;
  double decay_type;  // as DecayType
  double min_lr_factor;
  double schedule_generation;
  // The number of matrices that the last step orthogonalized.
  double orthogonalized;
  // Moving average of the weights (average.h): its settings, then the last decision.
  double ema_decay;   // of one step; unused if no tensor has an average
  double ema_warmup;  // 1: the first steps decay less
  double ema_weight;  // the weight of the new values: 1 - the decay
};
inline constexpr int kControlSize = sizeof(Control) / sizeof(double);

namespace {

// Updates the loss scale after a step: backs off on overflow, grows after enough good steps. The
// scale is rounded to float, as in torch.amp, and never grows to infinity. With hysteresis 1 this
// is torch.amp's rule (aten/src/ATen/native/cuda/AmpKernels.cu); otherwise that of Megatron,
// DeepSpeed and InternEvo. Unlike theirs, the scale never falls to 0: its minimum is 2**-126, whose
// reciprocal is finite.
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

// Updates a scale that a scaler keeps in its own float.
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
  return lr_factor(schedule, control.steps - control.skipped_steps);
}

// Returns the weight of the new values in a moving average after `updates` updates. With warmup the
// decay is at most (1 + t) / (10 + t), where t counts updates from 0 on, and 0 at first, as in
// diffusers (EMAModel.get_decay in training_utils.py).
TORCHOPT_HD inline double weight_in_average(const Control& control, double updates) {
  using L = ScalarLane<double>;
  double decay = control.ema_decay;
  if (control.ema_warmup != 0.0) {
    const double most = updates > 0.0 ? L::div(L::add(1.0, updates), L::add(10.0, updates)) : 0.0;
    decay = most < decay ? most : decay;
  }
  return L::sub(1.0, decay);
}

// Decides about a step. `total` is the accumulator's total. grad_scale and found_inf are the values
// that a gradient scaler passes to an optimizer, or null. Without grad_scale the block's own loss
// scale is used, and follows the overflows if it is dynamic.
TORCHOPT_HD inline void control_update(Control& control, double total, const float* grad_scale,
                                       const float* found_inf) {
  using L = ScalarLane<double>;
  const double scale =
      grad_scale != nullptr ? static_cast<double>(*grad_scale) : control.loss_scale;
  control.grad_scale = scale;
  control.orthogonalized = 0.0;
  const bool scaler_says_skip = found_inf != nullptr && *found_inf != 0.0f;
  control.grad_norm = L::div(L::sqrt(total), scale);
  control.clip_factor = 1.0;
  if (control.max_grad_norm > 0.0) {
    const double factor = L::div(control.max_grad_norm, L::add(control.grad_norm, 1e-6));
    control.clip_factor = factor > 1.0 ? 1.0 : factor;  // a NaN stays NaN
  }
  const double inverse = L::div(1.0, scale);
  control.grad_factor = L::mul(control.clip_factor, inverse);
  if (control.scheduled != 0.0) {
    control.lr_factor = scheduled_lr_factor(control);
  }
  control.ema_weight = weight_in_average(control, L::sub(control.steps, control.skipped_steps));
  // If 1 / scale overflows a float, unscaling would turn finite gradients into infinities.
  const auto largest = static_cast<double>(largest_finite<float>);
  const bool unscales = inverse <= largest && inverse >= -largest;
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

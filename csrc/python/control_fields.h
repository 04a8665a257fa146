// The control block's fields by name, for Python.
#pragma once

#include <array>
#include <bit>

#include "kernels/control.h"

namespace torchopt_ext {

// A field of the control block. kControlFields has all fields in the order of the struct.
struct ControlField {
  const char* name;
  double Control::*field;
};
inline constexpr ControlField kControlFields[kControlSize] = {
    {"max_grad_norm", &Control::max_grad_norm},
    {"skip_nonfinite", &Control::skip_nonfinite},
    {"grad_norm", &Control::grad_norm},
    {"clip_factor", &Control::clip_factor},
    {"grad_factor", &Control::grad_factor},
    {"found_inf", &Control::found_inf},
    {"skip", &Control::skip},
    {"grad_scale", &Control::grad_scale},
    {"steps", &Control::steps},
    {"skipped_steps", &Control::skipped_steps},
    {"loss_scale", &Control::loss_scale},
    {"growth_tracker", &Control::growth_tracker},
    {"hysteresis_tracker", &Control::hysteresis_tracker},
    {"growth_factor", &Control::growth_factor},
    {"backoff_factor", &Control::backoff_factor},
    {"growth_interval", &Control::growth_interval},
    {"hysteresis", &Control::hysteresis},
    {"consecutive_hysteresis", &Control::consecutive_hysteresis},
    {"min_scale", &Control::min_scale},
    {"max_scale", &Control::max_scale},
    {"lr_factor", &Control::lr_factor},
    {"scheduled", &Control::scheduled},
    {"warmup_steps", &Control::warmup_steps},
    {"stable_steps", &Control::stable_steps},
    {"decay_steps", &Control::decay_steps},
    {"decay_type", &Control::decay_type},
    {"min_lr_factor", &Control::min_lr_factor},
    {"schedule_generation", &Control::schedule_generation}};

// Field i of the list is the struct's i-th double.
static_assert([] {
  Control numbered{};
  std::array<double, kControlSize> expected{};
  for (int i = 0; i < kControlSize; ++i) {
    numbered.*kControlFields[i].field = expected[i] = i;
  }
  return std::bit_cast<decltype(expected)>(numbered) == expected;
}());

}  // namespace torchopt_ext

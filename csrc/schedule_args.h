// From the arguments of the lr_factor operators to a Schedule.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "kernels/schedule.h"

namespace torchopt_ext {

inline Schedule make_schedule(int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                              std::string_view decay_type, double min_factor, int64_t generation) {
  TORCH_CHECK_VALUE(warmup_steps >= 0, "warmup_steps is ", warmup_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(stable_steps >= 0, "stable_steps is ", stable_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(decay_steps >= 0, "decay_steps is ", decay_steps, ", expected 0 or more");
  TORCH_CHECK_VALUE(min_factor >= 0.0 && min_factor <= 1.0, "min_factor is ", min_factor,
                    ", expected 0 to 1");
  TORCH_CHECK_VALUE(generation == 1 || generation == 2, "generation is ", generation,
                    ", expected 1 or 2");
  DecayType type = DecayType::kLinear;
  if (decay_type == "sqrt") {
    type = DecayType::kSqrt;
  } else if (decay_type == "cosine") {
    type = DecayType::kCosine;
  } else {
    TORCH_CHECK_VALUE(decay_type == "linear", "decay_type is '", decay_type,
                      "', expected 'linear', 'sqrt' or 'cosine'");
  }
  return {warmup_steps, stable_steps, decay_steps, type, min_factor, static_cast<int>(generation)};
}

}  // namespace torchopt_ext

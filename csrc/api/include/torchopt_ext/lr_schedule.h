// Learning rates that warm up, stay and decay, as in torchtitan: docs/numerics.md section 5.
#pragma once

#include <cstdint>
#include <string>

namespace torchopt_ext {

struct LRSchedule {
  int64_t warmup_steps = 0;
  int64_t stable_steps = 0;
  int64_t decay_steps = 0;            // 0: no decay with generation 2, in one step with 1
  std::string decay_type = "linear";  // or "sqrt" or "cosine"
  double min_factor = 0.0;            // factor of the learning rate at the end, 0 to 1
  int64_t generation = 1;             // 1: torchtitan before 0.1; 2: later
};

// Returns the factor of the learning rate after `step` steps (0 or more). Raises c10::ValueError
// for an argument out of range.
double lr_factor(int64_t step, const LRSchedule& schedule);

}  // namespace torchopt_ext

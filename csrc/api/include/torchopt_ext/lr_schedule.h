// Learning rates that warm up, stay and decay, as in torchtitan: docs/numerics.md section 5.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchopt_ext {

struct LRSchedule {
  int64_t warmup_steps = 0;
  int64_t stable_steps = 0;
  int64_t decay_steps = 0;
  std::string decay_type = "linear";  // or "sqrt" or "cosine"
  double min_factor = 0.0;            // of the learning rate at the end, 0 to 1
  int64_t generation = 1;             // 1: torchtitan before 0.1; 2: later
};

// What the learning rate is multiplied by after `step` steps, 0 or more. Raises c10::ValueError for
// an argument out of range.
double lr_factor(int64_t step, const LRSchedule& schedule);

// Sets the learning rates of any libtorch optimizer, at once those of its next step, and with every
// call of step() those of the one after. The rates it finds are the ones that it multiplies: make
// it before an optimizer is loaded, with the number of steps that the loaded one has made.
class ScheduledLR : public torch::optim::LRScheduler {
 public:
  ScheduledLR(torch::optim::Optimizer& optimizer, LRSchedule schedule, unsigned steps_made = 0);

 private:
  std::vector<double> get_lrs() override;

  LRSchedule schedule_;
  std::vector<double> base_lrs_;
};

}  // namespace torchopt_ext

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
  int64_t decay_steps = 0;            // 0: no decay with generation 2, in one step with 1
  std::string decay_type = "linear";  // or "sqrt" or "cosine"
  double min_factor = 0.0;            // factor of the learning rate at the end, 0 to 1
  int64_t generation = 1;             // 1: torchtitan before 0.1; 2: later
};

// Returns the factor of the learning rate after `step` steps (0 or more). Raises c10::ValueError
// for an argument out of range.
double lr_factor(int64_t step, const LRSchedule& schedule);

// Sets the learning rates of any libtorch optimizer: the constructor those of the next step, step()
// those of the step after. The base rates are the optimizer's at construction: construct a
// ScheduledLR before loading the optimizer, with the number of steps that the saved optimizer made.
// Counts skipped steps. Raises c10::ValueError for an argument out of range, and for decay_steps 0
// with generation 1.
class ScheduledLR : public torch::optim::LRScheduler {
 public:
  ScheduledLR(torch::optim::Optimizer& optimizer, LRSchedule schedule, int64_t steps_made = 0);

  // Call after add_param_group(): takes the new groups' learning rates as their base rates, and
  // sets those of the next step.
  void add_groups();

 private:
  std::vector<double> get_lrs() override;

  LRSchedule schedule_;
  std::vector<double> base_lrs_;
};

}  // namespace torchopt_ext

#include <torchopt_ext/lr_schedule.h>

#include <limits>
#include <utility>

namespace torchopt_ext {

ScheduledLR::ScheduledLR(torch::optim::Optimizer& optimizer, LRSchedule schedule,
                         int64_t steps_made)
    : LRScheduler(optimizer), schedule_(std::move(schedule)) {
  TORCH_CHECK_VALUE(schedule_.decay_steps != 0 || schedule_.generation != 1,
                    "decay_steps is 0, with which generation 1 decays in one step: expected the "
                    "decay's steps, or generation 2 for no decay");
  TORCH_CHECK_VALUE(steps_made >= 0 && steps_made < std::numeric_limits<unsigned>::max(),
                    "steps_made is ", steps_made, ", expected a count of steps");
  step_count_ = static_cast<unsigned>(steps_made);
  step();
}

void ScheduledLR::add_groups() {
  --step_count_;
  step();
}

std::vector<double> ScheduledLR::get_lrs() {
  const std::vector<double> current = get_current_lrs();
  for (size_t g = base_lrs_.size(); g < current.size(); ++g) {
    base_lrs_.push_back(current[g]);
  }
  const double factor = lr_factor(step_count_, schedule_);
  std::vector<double> lrs;
  lrs.reserve(base_lrs_.size());
  for (const double base : base_lrs_) {
    lrs.push_back(base * factor);
  }
  return lrs;
}

}  // namespace torchopt_ext

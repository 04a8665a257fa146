#include <torchopt_ext/lr_schedule.h>

#include <utility>

namespace torchopt_ext {

ScheduledLR::ScheduledLR(torch::optim::Optimizer& optimizer, LRSchedule schedule,
                         unsigned steps_made)
    : LRScheduler(optimizer), schedule_(std::move(schedule)), base_lrs_(get_current_lrs()) {
  step_count_ = steps_made;
  step();
}

std::vector<double> ScheduledLR::get_lrs() {
  const double factor = lr_factor(step_count_, schedule_);
  std::vector<double> lrs;
  lrs.reserve(base_lrs_.size());
  for (const double base : base_lrs_) {
    lrs.push_back(base * factor);
  }
  return lrs;
}

}  // namespace torchopt_ext

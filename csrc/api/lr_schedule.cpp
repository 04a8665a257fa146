#include <ATen/core/dispatch/Dispatcher.h>
#include <torchopt_ext/lr_schedule.h>

#include <utility>

namespace torchopt_ext {

// By the operator, which checks its arguments.
double lr_factor(int64_t step, const LRSchedule& schedule) {
  using Signature = double(int64_t, int64_t, int64_t, int64_t, c10::string_view, double, int64_t);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchopt_ext::lr_factor", "")
                             .typed<Signature>();
  return op.call(step, schedule.warmup_steps, schedule.stable_steps, schedule.decay_steps,
                 schedule.decay_type, schedule.min_factor, schedule.generation);
}

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

// Operators on plain numbers, which run on the host whatever the device.
#include <torch/library.h>

#include "kernels/float_mode.h"
#include "kernels/partition.h"
#include "schedule_args.h"

namespace torchopt_ext {
namespace {

double lr_factor_op(int64_t step, int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                    c10::string_view decay_type, double min_factor, int64_t generation) {
  TORCH_CHECK_VALUE(step >= 0, "step is ", step, ", expected 0 or more");
  const FloatMode mode;
  return lr_factor(
      make_schedule(warmup_steps, stable_steps, decay_steps, decay_type, min_factor, generation),
      step);
}

std::vector<int64_t> partition_greedy_op(at::IntArrayRef numels, int64_t world_size,
                                         at::OptionalIntArrayRef initial_loads) {
  TORCH_CHECK_VALUE(world_size > 0, "world_size is ", world_size, ", expected 1 or more");
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(numels[i] >= 0, "numels[", i, "] is ", numels[i], ", expected 0 or more");
  }
  std::vector<int64_t> loads(static_cast<size_t>(world_size), 0);
  if (initial_loads.has_value()) {
    TORCH_CHECK_VALUE(initial_loads->size() == loads.size(), "got ", initial_loads->size(),
                      " initial_loads for world_size ", world_size);
    loads = initial_loads->vec();
  }
  return partition_greedy(numels.vec(), loads);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchopt_ext, CompositeExplicitAutograd, m) {
  m.impl("lr_factor", lr_factor_op);
  m.impl("partition_greedy", partition_greedy_op);
}

}  // namespace torchopt_ext

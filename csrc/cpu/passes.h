// A step on the CPU: pass A, control and pass B, each one call for all tensors.
#pragma once

#include <vector>

#include "kernels/schedule.h"
#include "work/passes.h"
#include "work/work_list.h"

namespace torchopt_ext::cpu {

// Pass A: adds the gradients' squares to the accumulator (int64[70]).
void sum_of_squares(const WorkList& work, const at::Tensor& accumulator);

void clear(const at::Tensor& accumulator);
at::Tensor accumulator_total(const at::Tensor& accumulator);

void control_update(const at::Tensor& control, const at::Tensor& accumulator,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf);

// After a step whose scale belongs to a scaler: `scale`, one float32 element, becomes the block's
// loss scale, follows `found_inf`, one float32 or float64 element, and is written back.
void loss_scale_update(const at::Tensor& control, const at::Tensor& found_inf,
                       const at::Tensor& scale);

// Pass B: advances step counts and updates every tensor that has a gradient, unless the control
// block says skip. Fills `traces` if the options ask for it.
void adam(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control,
          const Traces& traces);

// Every `param` of the list becomes its `grad`, times grad_factor if `unscale`, unless the control
// block says skip.
void scaled_copy(const WorkList& work, const at::Tensor& control, bool unscale);

// The schedule's factor after each of `steps` (int64): float64.
at::Tensor lr_factors(const Schedule& schedule, const at::Tensor& steps);

}  // namespace torchopt_ext::cpu

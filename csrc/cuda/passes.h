// The functions of cpu/passes.h on a CUDA device. None waits for the device. In a build without
// CUDA they raise (absent.cpp).
#pragma once

#include <vector>

#include "kernels/schedule.h"
#include "work/passes.h"
#include "work/work_list.h"

namespace torchopt_ext::cuda {

// The accumulator's digits are left as the blocks' sums make them unless `normalize`.
void sum_of_squares(const WorkList& work, const at::Tensor& accumulator, bool normalize);

void clear(const at::Tensor& accumulator);
at::Tensor accumulator_total(const at::Tensor& accumulator);

void control_update(const at::Tensor& control, const at::Tensor& accumulator,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf);

void loss_scale_update(const at::Tensor& control, const at::Tensor& found_inf,
                       const at::Tensor& scale);

void adam(const WorkList& work, const std::vector<GroupHyper>& groups, const at::Tensor& control,
          const Traces& traces);

void scaled_copy(const WorkList& work, const at::Tensor& control, bool unscale);

at::Tensor lr_factors(const Schedule& schedule, const at::Tensor& steps);

}  // namespace torchopt_ext::cuda

// The CPU back end of scaled_copy_ (plan/backend.h).
#pragma once

#include "plan/backend.h"

namespace torchopt_ext {

void scaled_copy_cpu(const WorkList& work, const at::Tensor& control, bool unscale);

}  // namespace torchopt_ext

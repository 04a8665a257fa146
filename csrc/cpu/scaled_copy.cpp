#include "cpu/scaled_copy.h"

#include "cpu/for_each_share.h"
#include "cpu/kernel_table.h"
#include "kernels/control.h"
#include "kernels/scaled_copy.h"

namespace torchopt_ext {
namespace {

// A list that writes more than this leaves little of itself in the caches: stores past them spare
// reading the lines first.
constexpr int64_t kPastCaches = int64_t{64} << 20;

}  // namespace

void scaled_copy_cpu(const WorkList& work, const at::Tensor& control, bool unscale) {
  const auto& decision = *static_cast<const Control*>(control.const_data_ptr());
  if (decision.skip != 0.0 || work.chunks.empty()) {
    return;
  }
  const double factor = unscale ? decision.grad_factor : 1.0;
  const bool past_caches = work.cumulative.back() > kPastCaches;
  for_each_share(work, [&](size_t first, size_t last) {
    const KernelTable& table = kernels();
    for (size_t i = first; i < last; ++i) {
      const Chunk& chunk = work.chunks[i];
      const TensorWork& x = work.tensors[static_cast<size_t>(chunk.tensor)];
      if (is_idle_copy(x.param, x.grad, x.param_dtype, factor)) {
        continue;
      }
      char* to = static_cast<char*>(x.param) + chunk.begin * element_size(x.param_dtype);
      const char* from =
          static_cast<const char*>(x.grad) + chunk.begin * element_size(x.grad_dtype);
      table.scaled_copy[static_cast<int>(x.param_dtype)][static_cast<int>(x.grad_dtype)](
          to, from, factor, chunk.end - chunk.begin, past_caches && to != from);
    }
    if (past_caches) {
      _mm_sfence();  // who comes next sees the stores past the caches
    }
  });
}

}  // namespace torchopt_ext

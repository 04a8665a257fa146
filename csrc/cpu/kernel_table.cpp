#include "cpu/kernel_table.h"

#include <ATen/Version.h>

#include <string>

namespace torchopt_ext {

const KernelTable& kernels() {
  static const KernelTable& chosen = []() -> const KernelTable& {
#ifdef __x86_64__
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") {
      return avx512_kernels();
    }
    if (capability == "AVX2") {
      return avx2_kernels();
    }
#endif
    return default_kernels();
  }();
  return chosen;
}

}  // namespace torchopt_ext

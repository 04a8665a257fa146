#include "cpu/kernel_table.h"

#include <ATen/Version.h>

#include <string>

namespace torchopt_ext {

const KernelTable& kernels() {
  static const KernelTable& chosen = []() -> const KernelTable& {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") {
      return avx512_kernels();
    }
    return capability == "AVX2" ? avx2_kernels() : default_kernels();
  }();
  return chosen;
}

}  // namespace torchopt_ext

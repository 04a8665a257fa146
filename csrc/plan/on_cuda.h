// The one choice between the back ends.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace torchopt_ext {

// Raises if there is no back end for the device.
inline bool on_cuda(at::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "torchopt_ext has no support for ",
              device.type(), " tensors, expected tensors on the CPU or on a CUDA device");
  return device.is_cuda();
}

}  // namespace torchopt_ext

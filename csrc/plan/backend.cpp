#include "plan/backend.h"

#include <array>

namespace torchopt_ext {
namespace {

std::array<Backend, static_cast<size_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES)>& backends() {
  static std::array<Backend, static_cast<size_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES)> table{};
  return table;
}

}  // namespace

void register_backend(at::DeviceType device, const Backend& backend) {
  backends()[static_cast<size_t>(device)] = backend;
}

const Backend& backend_for(at::Device device) {
  const Backend& backend = backends()[static_cast<size_t>(device.type())];
  TORCH_CHECK(backend.adam != nullptr, "torchopt_ext was built without support for ", device.type(),
              " tensors");
  return backend;
}

}  // namespace torchopt_ext

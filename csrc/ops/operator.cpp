#include "ops/operator.h"

namespace torchopt_ext {

void meta_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  bool some_have_memory = false;
  std::string first_meta;
  const auto visit = [&](const at::Tensor& tensor, const std::string& what) {
    some_have_memory = some_have_memory || !tensor.is_meta();
    if (tensor.is_meta() && first_meta.empty()) {
      first_meta = what;
    }
  };
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (values[a].isTensor()) {
      visit(values[a].toTensor(), arguments[a].name());
    } else if (values[a].isTensorList()) {
      const auto list = values[a].toTensorVector();
      for (size_t i = 0; i < list.size(); ++i) {
        visit(list[i], arguments[a].name() + "[" + std::to_string(i) + "]");
      }
    }
  }
  TORCH_CHECK(!some_have_memory, first_meta, " is on the meta device and has no data");
  torch::jit::drop(*stack, arguments.size());
}

}  // namespace torchopt_ext

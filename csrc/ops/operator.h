// Shared by the files of this folder. Each file defines one operator: its schema, its computation
// (documented in docs/numerics.md), its checks and its registration.
//
// Mutating operators end in `_` and return (). Each list operator also takes a plain tensor, so
// that a call with empty lists still finds its device. Lists that an operator writes are annotated
// `(a! -> *)`: TorchScript's alias analysis misses writes through `(a!)` to a list that the script
// itself makes, and removes the call (torch/csrc/jit/ir/alias_analysis.cpp).
//
// Overloads with a tensor are registered before overloads with a number: torch.ops takes the first
// overload that fits, and a tensor of one element converts to a number.
#pragma once

#include <torch/library.h>

#include <optional>
#include <utility>

namespace torchopt_ext {

// The Meta kernel of operators that return (). Under tracing no tensor has memory, so there is
// nothing to compute. Raises if only some tensors are on the meta device.
inline void meta_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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

// Registers an operator for the lifetime of the object. One function serves every dispatch key of
// tensors with memory. Sparse tensors reach the function, too: its error names their position.
// `meta` is the Meta kernel of an operator that returns a tensor.
class Operator {
 public:
  template <class Function>
  Operator(const std::string& name, const std::string& arguments, Function&& function,
           std::optional<torch::CppFunction> meta = std::nullopt) {
    schema_.def((name + arguments).c_str());
    kernel_.impl(name.c_str(), std::forward<Function>(function));
    if (arguments.ends_with("-> ()")) {
      meta_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&meta_kernel>());
    } else if (meta) {
      meta_.impl(name.c_str(), std::move(*meta));
    }
  }

 private:
  using Library = torch::Library;
  Library schema_{Library::FRAGMENT, "torchopt_ext", std::nullopt, __FILE__, __LINE__};
  Library kernel_{Library::IMPL, "torchopt_ext", c10::DispatchKey::CompositeExplicitAutograd,
                  __FILE__, __LINE__};
  Library meta_{Library::IMPL, "torchopt_ext", c10::DispatchKey::Meta, __FILE__, __LINE__};
};

}  // namespace torchopt_ext

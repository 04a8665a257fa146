// What the files of this folder share. Each defines one operator: its schema, what it computes
// (docs/numerics.md says how), its checks and its registration.
//
// Mutating operators end in `_` and return (). Each list operator also takes a plain tensor, so
// that a call with empty lists still finds its device.
#pragma once

#include <torch/library.h>

namespace torchopt_ext {

// The Meta kernel of operators that return (). Under tracing all tensors are without memory and
// there is nothing to compute. A mixture is a caller's error.
void shapes_only(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Registers an operator as long as it lives. One function serves every dispatch key of a tensor
// with memory, sparse ones too, which it rejects by their position.
class Operator {
 public:
  template <class Function>
  Operator(const std::string& name, const std::string& arguments, Function* function) {
    schema_.set_python_module("torchopt_ext.ops");
    schema_.def((name + arguments).c_str());
    kernel_.impl(name.c_str(), function);
    if (arguments.ends_with("-> ()")) {
      meta_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&shapes_only>());
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

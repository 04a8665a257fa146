// Shared by the tests of the C++ interface, which see its headers and its library alone.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>
#include <torchopt_ext/optim.h>

#include <functional>
#include <limits>
#include <optional>

namespace torchopt_ext::test {

using at::Tensor;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline Tensors some_params(at::ScalarType dtype = at::kFloat, unsigned seed = 1) {
  at::manual_seed(seed);
  Tensors params;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{3, 40}, {130}, {}, {0, 4}, {2, 3, 5}}) {
    params.push_back(torch::randn(shape, at::kDouble).to(dtype).requires_grad_());
  }
  return params;
}

inline void give_gradients(const Tensors& params, uint64_t seed, double scale = 1.0) {
  at::manual_seed(seed);
  for (const Tensor& param : params) {
    param.mutable_grad() =
        (scale * torch::randn(param.sizes(), at::kDouble)).to(param.scalar_type());
  }
}

inline Tensors copies(const Tensors& tensors, std::optional<at::ScalarType> dtype = std::nullopt) {
  Tensors result;
  for (const Tensor& tensor : tensors) {
    result.push_back(
        tensor.detach().to(dtype.value_or(tensor.scalar_type()), false, /*copy=*/true));
    result.back().requires_grad_(tensor.requires_grad());
  }
  return result;
}

inline void train(torch::optim::Optimizer& optimizer, const Tensors& params, int from, int to) {
  for (int step = from; step < to; ++step) {
    give_gradients(params, 100 + static_cast<uint64_t>(step));
    optimizer.step();
  }
}

inline ::testing::AssertionResult same(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) {
      return ::testing::AssertionFailure() << "tensor " << i << " differs";
    }
  }
  return ::testing::AssertionResult(a.size() == b.size());
}

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was raised";
}

inline FusedAdamWParamState& state_of(FusedAdamW& optimizer, const Tensor& param) {
  return static_cast<FusedAdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

inline const FusedAdamWOptions kVariants[] = {
    FusedAdamWOptions(1e-2),
    FusedAdamWOptions(1e-2).betas({0.7, 0.9}).eps(1e-4).weight_decay(0.3).amsgrad(true),
    FusedAdamWOptions(1e-2).weight_decay(0.1).decoupled_weight_decay(false)};

}  // namespace torchopt_ext::test

#include "work/orthogonalize.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <limits>

namespace torchopt_ext {
namespace {

// Returns X / max(|X|, eps) in X's dtype. Squares that leave fp32's range would make the norm 0 or
// infinite, so X is divided by its largest magnitude first. A zero matrix is divided by the least
// normal number. On a GPU each call is a launch: at::scalar_tensor makes a kernel's argument.
at::Tensor normalized(const at::Tensor& x, double eps) {
  const at::ScalarType wide = at::toOpMathType(x.scalar_type());
  const double least = wide == at::kDouble ? std::numeric_limits<double>::min()
                                           : double{std::numeric_limits<float>::min()};
  const auto norm = [&](const at::Tensor& of, double order) {
    return at::linalg_vector_norm(of, order, {-2, -1}, /*keepdim=*/true, wide);
  };
  const at::Tensor largest = norm(x, std::numeric_limits<double>::infinity()).clamp_min_(least);
  const at::Tensor scaled = x / largest;  // in `wide`
  const at::Tensor scaled_eps = at::scalar_tensor(std::max(eps, least), wide) / largest;
  at::Tensor result = at::empty_like(x);
  at::div_out(result, scaled, norm(scaled, 2.0).maximum(scaled_eps));
  return result;
}

}  // namespace

NewtonSchulz newton_schulz_of(at::ArrayRef<double> coefficients, double eps) {
  TORCH_CHECK_VALUE(coefficients.size() % 3 == 0, "got ", coefficients.size(),
                    " coefficients, expected three for each step");
  NewtonSchulz ns;
  ns.eps = eps;
  for (size_t i = 0; i < coefficients.size(); i += 3) {
    ns.coefficients.push_back({coefficients[i], coefficients[i + 1], coefficients[i + 2]});
  }
  return ns;
}

at::Tensor orthogonalized(const NewtonSchulz& ns, const at::Tensor& batch) {
  if (ns.instead) {
    at::Tensor result = ns.instead(batch);
    TORCH_CHECK(
        result.defined() && result.sizes() == batch.sizes(), "the group's orthogonalize returns ",
        result.defined() ? "a tensor of shape " : "no tensor",
        result.defined() ? result.sizes() : at::IntArrayRef(), ", expected ", batch.sizes());
    return result;
  }
  at::Tensor x = normalized(batch, ns.eps);
  const bool is_wide = x.size(-2) <= x.size(-1);
  for (const auto& [a, b, c] : ns.coefficients) {
    const at::Tensor r = is_wide ? at::bmm(x, x.mT()) : at::bmm(x.mT(), x);
    const at::Tensor q = at::baddbmm(r, r, r, /*beta=*/b, /*alpha=*/c);
    x = at::baddbmm(x, is_wide ? q : x, is_wide ? x : q, /*beta=*/a);
  }
  return x;
}

}  // namespace torchopt_ext

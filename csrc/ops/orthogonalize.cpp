// orthogonalize: Newton-Schulz iterations on each matrix of [..., m, n]. `coefficients` has three
// numbers for each step. fp32 and bf16 matrices on the CPU have their own products, others torch's.
#include "work/orthogonalize.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ops/operator.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

void check(const at::Tensor& matrices, double eps) {
  TORCH_CHECK(matrices.layout() == at::kStrided, "matrices has layout ", matrices.layout(),
              ", expected a dense tensor");
  TORCH_CHECK(matrices.is_floating_point(), "matrices has dtype ",
              dtype_name(matrices.scalar_type()),
              ", expected float32, bfloat16, float16 or float64");
  TORCH_CHECK(matrices.dim() >= 2, "matrices has shape ", matrices.sym_sizes(),
              ", expected two dimensions or more");
  TORCH_CHECK_VALUE(eps >= 0.0, "eps is ", eps, ", expected 0 or more");
}

template <class T>
void orthogonalize_on_cpu(const NewtonSchulz& ns, const at::Tensor& contiguous) {
  const int64_t rows = contiguous.size(-2);
  const int64_t cols = contiguous.size(-1);
  auto* const first = static_cast<T*>(contiguous.data_ptr());
  std::vector<cpu::MatrixOf<T>> all;
  for (T* x = first; x < first + contiguous.numel(); x += rows * cols) {
    all.push_back({x, rows, cols, cols});
  }
  const at::Tensor workspace =
      at::empty({cpu::orthogonalize_workspace(all)}, contiguous.options().dtype(at::kFloat));
  cpu::orthogonalize(ns, all, workspace.data_ptr<float>());
}

at::Tensor orthogonalize(const at::Tensor& matrices, at::ArrayRef<double> coefficients,
                         double eps) {
  check(matrices, eps);
  const NewtonSchulz ns = newton_schulz_of(coefficients, eps);
  at::Tensor result = at::empty_like(matrices, at::MemoryFormat::Contiguous);
  if (result.numel() == 0) {
    return result;
  }
  if (!matrices.is_cpu() || !cpu::orthogonalizes(matrices.scalar_type())) {
    const at::Tensor batch = matrices.detach().reshape({-1, matrices.size(-2), matrices.size(-1)});
    return result.copy_(orthogonalized(ns, batch).view_as(result));
  }
  result.copy_(matrices.detach());
  if (matrices.scalar_type() == at::kBFloat16) {
    orthogonalize_on_cpu<BFloat16>(ns, result);
  } else {
    orthogonalize_on_cpu<float>(ns, result);
  }
  return result;
}

at::Tensor orthogonalize_meta(const at::Tensor& matrices, at::ArrayRef<double> coefficients,
                              double eps) {
  check(matrices, eps);
  static_cast<void>(newton_schulz_of(coefficients, eps));
  return at::empty_like(matrices, at::MemoryFormat::Contiguous);
}

const Operator kOrthogonalize("orthogonalize",
                              "(Tensor matrices, float[] coefficients, float eps=1e-7) -> Tensor",
                              orthogonalize, torch::CppFunction(orthogonalize_meta));

}  // namespace
}  // namespace torchopt_ext

#include "plan/matrices.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "cpu/float_mode.h"

namespace torchopt_ext {
namespace {

// Elements whose cast is worth a thread.
constexpr int64_t kCastPerThread = 1 << 15;

bool is_multiplied_here(const NewtonSchulz& newton_schulz, at::Device device,
                        at::ScalarType dtype) {
  return !newton_schulz.instead && device.is_cpu() &&
         (dtype == at::kDouble || cpu::orthogonalizes(dtype));
}

template <class T>
std::vector<cpu::MatrixOf<T>> in_memory(const std::vector<Matrix>& matrices, T* memory) {
  std::vector<cpu::MatrixOf<T>> all;
  all.reserve(matrices.size());
  for (const auto& [first, rows, cols, stride, lr_scale] : matrices) {
    all.push_back({memory + first, rows, cols, stride});
  }
  return all;
}

// By this library's products.
void orthogonalize_on_cpu(const NewtonSchulz& newton_schulz, const std::vector<Matrix>& matrices,
                          const at::Tensor& buffer, const at::Tensor& workspace) {
  auto* const memory = workspace.data_ptr<float>();
  if (buffer.scalar_type() == at::kBFloat16) {
    auto* const x = static_cast<BFloat16*>(buffer.data_ptr());
    cpu::orthogonalize(newton_schulz, in_memory(matrices, x), memory);
    return;
  }
  const bool is_double = buffer.scalar_type() == at::kDouble;
  const at::Tensor directions =
      is_double ? at::empty(buffer.sizes(), buffer.options().dtype(at::kFloat)) : buffer;
  auto* const x = directions.data_ptr<float>();
  if (is_double) {  // torch's cast follows the caller's rounding mode
    const auto* const from = buffer.const_data_ptr<double>();
    at::parallel_for(0, buffer.numel(), kCastPerThread, [&](int64_t begin, int64_t end) {
      const FloatMode mode;
      std::copy(from + begin, from + end, x + begin);
    });
  }
  cpu::orthogonalize(newton_schulz, in_memory(matrices, x), memory);
  if (is_double) {
    buffer.copy_(directions);
  }
}

// By torch's products or the group's function, matrices of one shape at equal distances in one
// batch. Large ones gain nothing from it, and lose nothing: the buffer's size limits the batch.
void orthogonalize_batches(const NewtonSchulz& newton_schulz, const std::vector<Matrix>& matrices,
                           const at::Tensor& buffer) {
  for (size_t i = 0; i < matrices.size();) {
    const auto& [first, rows, cols, stride, lr_scale] = matrices[i];
    int64_t distance = rows * stride;
    int64_t size = 1;
    for (; i + size < matrices.size(); ++size) {
      const Matrix& next = matrices[i + size];
      distance = size == 1 ? next.first - first : distance;
      if (next.rows != rows || next.cols != cols || next.stride != stride ||
          next.first != first + size * distance) {
        break;
      }
    }
    const at::Tensor batch = buffer.as_strided({size, rows, cols}, {distance, stride, 1}, first);
    batch.copy_(orthogonalized(newton_schulz, batch));
    i += static_cast<size_t>(size);
  }
}

}  // namespace

int64_t orthogonalize_workspace(const NewtonSchulz& newton_schulz,
                                const std::vector<Matrix>& matrices, at::Device device,
                                at::ScalarType dtype) {
  if (!is_multiplied_here(newton_schulz, device, dtype)) {
    return 0;
  }
  return dtype == at::kBFloat16
             ? cpu::orthogonalize_workspace(in_memory<BFloat16>(matrices, nullptr))
             : cpu::orthogonalize_workspace(in_memory<float>(matrices, nullptr));
}

void orthogonalize_matrices(const NewtonSchulz& newton_schulz, std::vector<Matrix> matrices,
                            const at::Tensor& buffer, at::Tensor workspace) {
  std::erase_if(matrices, [](const Matrix& matrix) { return matrix.rows * matrix.cols == 0; });
  if (!is_multiplied_here(newton_schulz, buffer.device(), buffer.scalar_type())) {
    orthogonalize_batches(newton_schulz, matrices, buffer);
    return;
  }
  if (!workspace.defined()) {
    const int64_t floats =
        orthogonalize_workspace(newton_schulz, matrices, buffer.device(), buffer.scalar_type());
    workspace = at::empty({floats}, buffer.options().dtype(at::kFloat));
  }
  orthogonalize_on_cpu(newton_schulz, matrices, buffer, workspace);
}

}  // namespace torchopt_ext

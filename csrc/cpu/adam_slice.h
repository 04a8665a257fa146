// Pass B on a slice of one tensor. 16-bit parameters and states are converted in tiles that stay
// in the first-level cache, around one compute kernel: element types add kernels, they do not
// multiply them.
#pragma once

#include "cpu/kernel_table.h"
#include "plan/chunk_table.h"

namespace torchopt_ext {

class Tile {
 public:
  static constexpr int64_t kElements = 512;

  // The elements of `memory` from `begin` as floats: in place when they are floats already.
  float* open(const KernelTable& table, void* memory, DType dtype, int64_t begin, int64_t n) {
    memory_ = static_cast<char*>(memory) + begin * element_size(dtype);
    dtype_ = dtype;
    if (dtype == DType::kFloat32) {
      return static_cast<float*>(memory_);
    }
    table.widen[static_cast<int>(dtype)](memory_, buffer_, n);
    return buffer_;
  }
  void close(const KernelTable& table, int64_t n) const {
    if (dtype_ != DType::kFloat32) {
      table.narrow[static_cast<int>(dtype_)](buffer_, memory_, n);
    }
  }

 private:
  void* memory_ = nullptr;
  DType dtype_ = DType::kFloat32;
  alignas(64) float buffer_[kElements];
};

inline void adam_slice(const KernelTable& table, const AdamScalars<float>& scalars,
                       const TensorWork& work, int64_t begin, int64_t end) {
  const bool plain = work.param_dtype == DType::kFloat32 && work.state_dtype == DType::kFloat32;
  const int64_t tile = plain ? end - begin : Tile::kElements;
  Tile param;
  Tile grad;
  Tile exp_avg;
  Tile exp_avg_sq;
  Tile max_exp_avg_sq;
  for (int64_t i = begin; i < end; i += tile) {
    const int64_t n = end - i < tile ? end - i : tile;
    float* p = param.open(table, work.param, work.param_dtype, i, n);
    // The tile of a gradient is read only: it is never closed.
    const float* g = grad.open(table, const_cast<void*>(work.grad), work.param_dtype, i, n);
    float* m = exp_avg.open(table, work.exp_avg, work.state_dtype, i, n);
    float* v = exp_avg_sq.open(table, work.exp_avg_sq, work.state_dtype, i, n);
    float* vmax = work.max_exp_avg_sq == nullptr
                      ? nullptr
                      : max_exp_avg_sq.open(table, work.max_exp_avg_sq, work.state_dtype, i, n);
    table.adam_float(scalars, p, g, m, v, vmax, n);
    param.close(table, n);
    exp_avg.close(table, n);
    exp_avg_sq.close(table, n);
    if (vmax != nullptr) {
      max_exp_avg_sq.close(table, n);
    }
  }
}

inline void adam_slice(const KernelTable& table, const AdamScalars<double>& scalars,
                       const TensorWork& work, int64_t begin, int64_t end) {
  const auto at = [begin](void* memory) {
    return memory == nullptr ? nullptr : static_cast<double*>(memory) + begin;
  };
  table.adam_double(scalars, at(work.param), at(const_cast<void*>(work.grad)), at(work.exp_avg),
                    at(work.exp_avg_sq), at(work.max_exp_avg_sq), end - begin);
}

}  // namespace torchopt_ext

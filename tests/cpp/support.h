// Shared by the test programs: the kernel tables this machine can run, and gradients of every type.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/kernel_table.h"
#include "kernels/kinds.h"

namespace torchopt_ext {

// Adam's arrays and kinds, in the order of its declaration.
inline constexpr Array kExpAvg = state_array(Adam::kExpAvg);
inline constexpr Array kExpAvgSq = state_array(Adam::kExpAvgSq);
inline constexpr Array kMaxExpAvgSq = state_array(Adam::kMaxExpAvgSq);
struct AdamKind {
  static constexpr Kind kFloat32{0};
  static constexpr Kind kFloat64{1};
  static constexpr Kind kBFloat16{2};
  static constexpr Kind kBFloat16Master{3};
  static constexpr Kind kBFloat16Remainder{4};
  static constexpr Kind kGeneral{6};
  static constexpr Kind kInt8Float32{7};
  static constexpr Kind kInt8BFloat16{8};
  static constexpr Kind kInt8Remainder8{10};
  static constexpr Kind kInt8{11};
};

inline std::vector<const KernelTable*> runnable_tables() {
  std::vector<const KernelTable*> tables{&default_kernels()};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) {
    tables.push_back(&avx2_kernels());
  }
  if (__builtin_cpu_supports("avx512bw")) {
    tables.push_back(&avx512_kernels());
  }
#endif
  return tables;
}

constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                                DType::kFloat16};

// Returns `n` elements of a type as raw memory: normal values times 2**-spread to 2**spread.
inline std::vector<unsigned char> random_elements(DType dtype, int64_t n, int spread,
                                                  unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-spread, spread);
  std::vector<unsigned char> memory(static_cast<size_t>(n * element_size(dtype)));
  for (int64_t i = 0; i < n; ++i) {
    const double value = std::ldexp(normal(random), exponent(random));
    unsigned char* to = memory.data() + i * element_size(dtype);
    const auto single = static_cast<float>(value);
    if (dtype == DType::kInt8) {
      *to = static_cast<unsigned char>(random());
    } else if (dtype == DType::kFloat64) {
      std::memcpy(to, &value, sizeof(value));
    } else if (dtype == DType::kFloat32) {
      std::memcpy(to, &single, sizeof(single));
    } else {
      const uint16_t half =
          dtype == DType::kBFloat16 ? narrow<BFloat16>(single).bits : narrow<Float16>(single).bits;
      std::memcpy(to, &half, sizeof(half));
    }
  }
  return memory;
}

// Subtracts `amounts` from the parameter through pass B's kernel for any layout, so that a test
// chooses what is stored. Uses its own gradient and moments, not those of `work`.
inline void subtract(const KernelTable& table, TensorWork work, std::vector<float> amounts,
                     const StepOptions& options = {}) {
  TensorScalars scalars{};  // exp_avg stays, exp_avg_sq becomes 0, and the update is exp_avg
  scalars.as_float.flag[Adam::kSmallW1] = true;
  scalars.as_float.value[Adam::kEpsHat] = 1.0f;
  scalars.as_float.step_size = 1.0f;
  std::vector<float> grad(amounts.size());
  std::vector<float> exp_avg_sq(amounts.size());
  work.memory[kGrad] = grad.data();
  work.memory[kExpAvg] = amounts.data();
  work.memory[kExpAvgSq] = exp_avg_sq.data();
  table.update[static_cast<int>(AdamKind::kGeneral)](scalars, work, options, 0,
                                                     static_cast<int64_t>(amounts.size()),
                                                     /*change=*/nullptr);
}

// Returns a tensor with the given arrays; its other arrays are null.
inline TensorWork work_of(Layout layout, void* param, void* master = nullptr) {
  TensorWork work{};
  work.layout = layout;
  work.layout.states = Adam::kMoments;
  work.kind = kind_of(kNumberOf<Adam>, work.layout, {}, /*whole_groups=*/true);
  work.memory[kParam] = param;
  work.memory[kMaster] = master;
  return work;
}

}  // namespace torchopt_ext

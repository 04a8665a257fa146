// Adam on arrays of any element type: the formula of adam.h between loads and stores that convert
// in registers. Types are told apart while it runs, by branches that go the same way throughout a
// tensor and so cost little: element types and ways to hold a weight add cases here, they do not
// multiply kernels (cpu/kernels.cpp takes the branches out for the usual types). Converting in
// tiles beside the fp32 kernel instead left memory idle while a tile was converted.
#pragma once

#include "kernels/adam.h"

namespace torchopt_ext {

struct AdamStreams {
  void* param = nullptr;
  const void* grad = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;    // null without amsgrad
  void* master = nullptr;            // as Weights says
  const uint64_t* random = nullptr;  // of each element, or null: round to nearest
  DType param_dtype = DType::kFloat32;
  DType grad_dtype = DType::kFloat32;
  DType state_dtype = DType::kFloat32;
  Weights weights = Weights::kPlain;
  // Beside a master the parameter is written and not read: aligned stores past the caches spare
  // reading its lines first.
  bool param_past_caches = false;
};

namespace {

template <class L>
TORCHOPT_HD inline typename L::reg load_any(const void* x, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return L::load(static_cast<const BFloat16*>(x) + i);
    case DType::kFloat16:
      return L::load(static_cast<const Float16*>(x) + i);
    default:
      return L::load(static_cast<const float*>(x) + i);
  }
}

template <class L>
TORCHOPT_HD inline void store_any(void* x, DType dtype, int64_t i, typename L::reg a,
                                  const uint64_t* random, Draw draw) {
  switch (dtype) {
    case DType::kBFloat16:
      if (random != nullptr) {
        L::store_stochastic(static_cast<BFloat16*>(x) + i, a, random + i, draw);
      } else {
        L::store(static_cast<BFloat16*>(x) + i, a);
      }
      break;
    case DType::kFloat16:
      L::store(static_cast<Float16*>(x) + i, a);
      break;
    default:
      L::store(static_cast<float*>(x) + i, a);
  }
}

// 16-bit types, as only those have masters.
template <class L>
TORCHOPT_HD inline void stream_any(void* x, DType dtype, int64_t i, typename L::reg a) {
  if (dtype == DType::kBFloat16) {
    L::stream(static_cast<BFloat16*>(x) + i, a);
  } else {
    L::stream(static_cast<Float16*>(x) + i, a);
  }
}

template <class L>
TORCHOPT_HD inline typename L::reg load_weight(const AdamStreams& x, int64_t i) {
  switch (x.weights) {
    case Weights::kMaster:
      return L::load(static_cast<const float*>(x.master) + i);
    case Weights::kRemainder:
      return L::joined(static_cast<const BFloat16*>(x.param) + i,
                       static_cast<const int16_t*>(x.master) + i);
    default:
      return load_any<L>(x.param, x.param_dtype, i);
  }
}

template <class L>
TORCHOPT_HD inline void store_weight(const AdamStreams& x, int64_t i, typename L::reg p) {
  switch (x.weights) {
    case Weights::kMaster:
      L::store(static_cast<float*>(x.master) + i, p);
      if (x.param_past_caches) {
        stream_any<L>(x.param, x.param_dtype, i, p);
      } else {
        store_any<L>(x.param, x.param_dtype, i, p, nullptr, kDrawParam);
      }
      break;
    case Weights::kRemainder:
      L::store_split(static_cast<BFloat16*>(x.param) + i, static_cast<int16_t*>(x.master) + i, p);
      break;
    default:
      store_any<L>(x.param, x.param_dtype, i, p, x.random, kDrawParam);
  }
}

// Elements [i, i + L::width). L is a float lane.
template <class L>
TORCHOPT_HD inline void adam_streams(const AdamScalars<float>& s, const AdamStreams& x, int64_t i) {
  using R = typename L::reg;
  R p = load_weight<L>(x, i);
  const R g = load_any<L>(x.grad, x.grad_dtype, i);
  R m = load_any<L>(x.exp_avg, x.state_dtype, i);
  R v = load_any<L>(x.exp_avg_sq, x.state_dtype, i);
  const bool amsgrad = x.max_exp_avg_sq != nullptr;
  R vmax = amsgrad ? load_any<L>(x.max_exp_avg_sq, x.state_dtype, i) : L::set1(0.0f);
  adam_registers<L>(s, p, g, m, v, amsgrad ? &vmax : nullptr);
  store_any<L>(x.exp_avg, x.state_dtype, i, m, x.random, kDrawExpAvg);
  store_any<L>(x.exp_avg_sq, x.state_dtype, i, v, x.random, kDrawExpAvgSq);
  store_weight<L>(x, i, p);
  if (amsgrad) {
    store_any<L>(x.max_exp_avg_sq, x.state_dtype, i, vmax, x.random, kDrawMaxExpAvgSq);
  }
}

}  // namespace
}  // namespace torchopt_ext

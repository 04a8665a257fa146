// The arguments of an Adam step: as a param group has them, and as an element needs them.
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

// How the value that a step updates is held.
enum class Weights : int32_t {
  kPlain,      // the parameter itself
  kMaster,     // fp32 master weight; the 16-bit parameter is written only
  kRemainder,  // bf16 parameter and int16 remainder (remainder.h)
};

namespace {

// Bytes of an element of what is kept beside the parameter; no weight is kept beside a plain one.
TORCHOPT_HD inline int64_t master_size(Weights weights) {
  return weights == Weights::kMaster ? 4 : 2;
}

}  // namespace

// One param group's arguments.
struct AdamHyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;  // AdamW; otherwise the decay is added to the gradient (Adam)
  bool maximize;
};

// What an element needs, rounded once to the compute type.
template <class T>
struct AdamScalars {
  T grad_factor, l2, beta1, beta2, w1, w2, eps_hat, decay, step_size;
  bool maximize, has_l2, has_decay, small_w1, small_w2;
};

}  // namespace torchopt_ext

// One parameter of a step, from the plan to the kernels of both back ends.
#pragma once

#include "kernels/adam_args.h"

namespace torchopt_ext {

// Pointers are to dense storage; element index is storage order. A scaled copy uses `param`, which
// it writes, `grad`, which it reads, their dtypes and numel.
struct TensorWork {
  void* param;
  void* grad;  // null: no gradient in this step, the tensor stays as it is
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  void* master;          // fp32 master weight or int16 remainder; null if the parameter is all
  float* step;
  int64_t numel;
  int64_t row_length;  // the unit that blocks never cross: kernels/block_rule.h
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
  Weights weights;
  int32_t group;  // index of its hyperparameters
  // The whole parameter's index and this shard's place in it, for draws and digests, which do not
  // depend on sharding: element i is element global_element(work, i) of parameter `index`.
  uint32_t index;
  int64_t first_element;
  int64_t run;     // elements of the shard that follow one another in the parameter; 0: all do
  int64_t stride;  // from one such run to the next
};

// What a step does beyond the update, the same for all its tensors.
struct StepOptions {
  bool stochastic_rounding = false;   // bf16 parameters without master, and bf16 moments
  bool write_back_gradients = false;  // gradients become unscaled and clipped in memory, too
  uint32_t track = 0;                 // what to note in a ChunkTrace of each chunk (Track)
  uint64_t rounding_seed = 0;
};

namespace {

TORCHOPT_HD inline int64_t global_element(const TensorWork& work, int64_t i) {
  return work.first_element + (work.run == 0 ? i : i / work.run * work.stride + i % work.run);
}

// Whether what a step stores of a tensor takes random bits: not where an fp32 master or a remainder
// keeps what the parameter loses.
TORCHOPT_HD inline bool rounds_randomly(const StepOptions& options, const TensorWork& work) {
  return options.stochastic_rounding &&
         ((work.param_dtype == DType::kBFloat16 && work.weights == Weights::kPlain) ||
          work.state_dtype == DType::kBFloat16);
}

}  // namespace
}  // namespace torchopt_ext

// Every operator's schema: the table of contents. docs/numerics.md says what each one computes.
//
// Mutating operators end in `_` and return (). Each list operator also takes a plain tensor, so
// that a call with empty lists still finds its back end.
#include <torch/library.h>

TORCH_LIBRARY(torchopt_ext, m) {
  m.set_python_module("torchopt_ext.ops");

  // Pass A: adds every gradient's sum of squares to the exact accumulator (int64[70]).
  m.def("grad_sumsq_(Tensor[] grads, Tensor(a!) accumulator) -> ()");

  // The accumulator's sum, rounded once to float64; NaN or infinity if one was counted.
  m.def("accumulator_total(Tensor accumulator) -> Tensor");

  // Control: from the (reduced) accumulator to norm, clip factor, overflow flag and skip decision,
  // all in the control block (float64, fields as in csrc/kernels/control.h).
  m.def(
      "control_update_(Tensor(a!) control, Tensor accumulator, Tensor? grad_scale=None, "
      "Tensor? found_inf=None) -> ()");

  // After a step under a gradient scaler: `scale` (one float32 element) becomes the control block's
  // loss scale, backs off or grows by its settings, and is written back.
  m.def("loss_scale_update_(Tensor(a!) control, Tensor found_inf, Tensor(b!) scale) -> ()");

  // Pass B: one Adam or AdamW step over lists of tensors. max_exp_avg_sqs is empty without amsgrad.
  // Reads grad_factor and skip from the control block; gradients are read only.
  m.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, Tensor control, *, float lr, "
      "float beta1, float beta2, float eps, float weight_decay, bool decoupled_weight_decay, "
      "bool maximize) -> ()");
  // The same with the learning rate in a one-element tensor, on the CPU or the parameters' device.
  m.def(
      "adam_.tensor_lr(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, "
      "Tensor control, *, Tensor lr, float beta1, float beta2, float eps, float weight_decay, "
      "bool decoupled_weight_decay, bool maximize) -> ()");

  // to[i] = from_[i], times the control block's grad_factor if `unscale`, converted; nothing if it
  // says skip. to[i] may be from_[i]. (Python's keyword would break the code torch.compile writes.)
  m.def("scaled_copy_(Tensor(a!)[] to, Tensor[] from_, Tensor control, *, bool unscale) -> ()");

  // Learning-rate factor of the warmup-stable-decay family after `step` steps.
  m.def(
      "lr_factor(int step, *, int warmup_steps, int stable_steps, int decay_steps, "
      "str decay_type=\"linear\", float min_factor=0.0, int generation=1) -> float");
  // The same for every element of an int64 tensor; float64 on its device.
  m.def(
      "lr_factor.tensor(Tensor step, *, int warmup_steps, int stable_steps, int decay_steps, "
      "str decay_type=\"linear\", float min_factor=0.0, int generation=1) -> Tensor");

  // Greedy partition of whole tensors, largest first, each to the least loaded rank: the rank of
  // every tensor, in the order given. `initial_loads` are elements that ranks already hold; ranks
  // of equal load come in the order of `tie_loads`.
  m.def(
      "partition_greedy(int[] numels, int world_size, int[]? initial_loads=None, "
      "int[]? tie_loads=None) -> int[]");

  // Which rank steps which parameters of DistributedDataParallel's gradient buckets, as torch's
  // ZeroRedundancyOptimizer decides it: rows of bucket, first parameter, number of parameters and
  // rank. `numels` are the parameters' sizes, bucket by bucket.
  m.def(
      "partition_buckets(int[] numels, int[] bucket_lengths, int world_size, bool shard_buckets) "
      "-> int[]");

  // Tensors laid one after the other into buckets, each bucket cut into one interval a rank: the
  // tensors' buckets and starts, the buckets' lengths, and world_size + 1 cuts for each bucket.
  m.def(
      "partition_balanced(int[] numels, int[] row_lengths, int world_size, "
      "int? bucket_elements=None, int alignment=64) "
      "-> (int[] buckets, int[] starts, int[] lengths, int[] cuts)");
}

// torch::optim::AdamW with gradient norm, clipping and overflow check inside the step: docs/cpp.md.
// What it computes is in docs/numerics.md, to the bit.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torchopt_ext/lr_schedule.h>
#include <torchopt_ext/partition.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace torchopt_ext {

class PlannedStep;

// A param group's options, those of torch::optim::AdamW first.
struct FusedAdamWOptions : torch::optim::OptimizerCloneableOptions<FusedAdamWOptions> {
  FusedAdamWOptions(double lr = 1e-3);
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
  TORCH_ARG(bool, decoupled_weight_decay) = true;  // false: Adam, which adds the decay to gradients

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

 private:
  friend class FusedAdamW;
  bool of_another_class_ = false;  // of an archive that lacks the last two
};

// A parameter's state. The step count is one float32 on the parameter's device; the moments have
// the parameter's shape and dtype, and without amsgrad there is no maximum.
struct FusedAdamWParamState : torch::optim::OptimizerCloneableParamState<FusedAdamWParamState> {
  TORCH_ARG(torch::Tensor, step);
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);
  TORCH_ARG(torch::Tensor, max_exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Steps dense parameters of one device: the CPU or a CUDA device. Options of a group that equal
// FusedAdamWOptions() are the optimizer's, as in libtorch 2.15. Archives are those of
// torch::optim::AdamW, which reads ours, and whose we read.
class FusedAdamW : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // Raise c10::Error for an option out of range.
  explicit FusedAdamW(const ParamGroups& param_groups, const FusedAdamWOptions& defaults = {});
  explicit FusedAdamW(std::vector<torch::Tensor> params, const FusedAdamWOptions& defaults = {});
  // Of Module::named_parameters(): messages then have the parameters' names.
  explicit FusedAdamW(const torch::OrderedDict<std::string, torch::Tensor>& named_params,
                      const FusedAdamWOptions& defaults = {});
  ~FusedAdamW() override;
  FusedAdamW(FusedAdamW&& other) noexcept;
  FusedAdamW& operator=(FusedAdamW&& other) noexcept;

  // Clips the gradients, inside the step, to this 2-norm over all of them; the gradients themselves
  // are not changed. 0: off. Infinity: measures the norm without clipping.
  TORCH_ARG(double, max_grad_norm) = 0.0;
  // Whether a step in which a gradient is not finite changes nothing.
  TORCH_ARG(bool, skip_nonfinite) = false;

 public:
  // Updates the parameters that have a gradient; returns the closure's loss, if there is a closure.
  // Raises c10::Error, naming the parameter, and updates none if a tensor does not fit.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // The norm of the last step's gradients before clipping, one float64 on the parameters' device:
  // nothing waits for a GPU until it is read. NaN if neither clipping nor skipping asked for it.
  torch::Tensor grad_norm() const;
  // How many steps were made and how many of them were skipped; likewise.
  torch::Tensor steps() const;
  torch::Tensor skipped_steps() const;

  // Shadows torch's, which is not virtual.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method)
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // load() checks the whole archive before anything changes, and converts it to the parameters'
  // device. Groups and the numbers of their parameters must be those that were saved. What an
  // archive of libtorch's Adam or AdamW does not say, the groups' own options do.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::unique_ptr<PlannedStep> planned_;
};

}  // namespace torchopt_ext

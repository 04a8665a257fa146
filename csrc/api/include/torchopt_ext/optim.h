// torch::optim::AdamW with gradient norm, clipping and overflow check inside the step: docs/cpp.md.
// docs/numerics.md defines the results to the bit.
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

// The options of a param group. The first five are those of torch::optim::AdamW.
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
  bool operator==(const FusedAdamWOptions& other) const;
  double get_lr() const override;
  void set_lr(double lr) override;

 private:
  friend class FusedAdamW;
  std::vector<std::string> lacking_;  // options that the archive of the others lacks
};

// The state of a parameter. The step count is one float32 on the parameter's device. The moments
// have the parameter's shape and dtype. Only amsgrad needs max_exp_avg_sq.
struct FusedAdamWParamState : torch::optim::OptimizerCloneableParamState<FusedAdamWParamState> {
  TORCH_ARG(torch::Tensor, step);
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);
  TORCH_ARG(torch::Tensor, max_exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Steps strided parameters on one device, the CPU or a CUDA device. A group takes each option that
// equals that of FusedAdamWOptions() from the optimizer's defaults, as in libtorch 2.15. The
// archive format is that of torch::optim::AdamW: each class loads the archives of the other.
class FusedAdamW : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // The constructors raise c10::Error for an option out of range, and for a parameter that is
  // listed twice, as Module::parameters() lists those of a module that is registered twice.
  explicit FusedAdamW(const ParamGroups& param_groups, const FusedAdamWOptions& defaults = {});
  explicit FusedAdamW(std::vector<torch::Tensor> params, const FusedAdamWOptions& defaults = {});
  // Takes Module::named_parameters(): error messages then name the parameters.
  explicit FusedAdamW(const torch::OrderedDict<std::string, torch::Tensor>& named_params,
                      const FusedAdamWOptions& defaults = {});
  ~FusedAdamW() override;
  FusedAdamW(FusedAdamW&& other) noexcept;
  FusedAdamW& operator=(FusedAdamW&& other) noexcept;

  // Clips gradients inside the step to this 2-norm over all gradients. The gradients in memory do
  // not change. 0: off. Infinity: measures the norm without clipping.
  TORCH_ARG(double, max_grad_norm) = 0.0;
  // Whether a step with an infinite or NaN gradient changes nothing.
  TORCH_ARG(bool, skip_nonfinite) = false;

 public:
  // Updates the parameters that have a gradient; returns the closure's loss, if there is a closure.
  // Raises c10::Error, naming the parameter, if a tensor does not fit: then nothing is updated, and
  // no parameter has new state.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Returns the norm of the last step's gradients before clipping, one float64 on the parameters'
  // device. Only reading the value waits for a GPU. NaN if neither clipping nor skipping was on.
  torch::Tensor grad_norm() const;
  // Return the numbers of steps and of skipped steps, each one float64 on the parameters' device,
  // or on the CPU before the first step.
  torch::Tensor steps() const;
  torch::Tensor skipped_steps() const;

  // Shadows torch's method of this name, which is not virtual: a call through a reference to
  // torch::optim::Optimizer gives the group the optimizer's defaults instead of its own options.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method)
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // load() checks the whole archive before it changes anything, and copies the state to the
  // parameters' device. State of a parameter that requires no gradient is checked when it has one.
  // The number of groups and of parameters per group must equal the archive's.
  // maximize and decoupled_weight_decay, which archives of libtorch's Adam and AdamW lack, keep the
  // groups' values. Raises if an archive lacks another option, step or moments.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  PlannedStep& planned() const;  // raises if the optimizer was moved from

  std::unique_ptr<PlannedStep> planned_;
};

}  // namespace torchopt_ext

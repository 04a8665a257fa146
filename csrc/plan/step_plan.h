// A step plan: the parameters of one device with their state, checked once, and this step's
// gradients. Operators and optimizer classes both run their passes through it.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "plan/backend.h"

namespace torchopt_ext {

class StepPlan {
 public:
  struct Entry {
    at::Tensor param;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor max_exp_avg_sq;  // undefined without amsgrad
    at::Tensor step;            // one fp32 element
    int32_t group = 0;          // index into update()'s hyperparameters
    std::string name;           // for messages; may be empty
    size_t position = 0;        // for messages: index in the caller's list
  };

  // Checks shapes, dtypes, devices, strides and overlap. A parameter that is not dense is stepped
  // through a dense copy; the operators refuse it beforehand.
  StepPlan(std::vector<Entry> entries, at::Device device);

  // Whether every tensor still has the memory, shape and type the plan was built for.
  bool unchanged() const;

  // An optimizer's plan holds its tensors only during a step: torch.utils.swap_tensors, which
  // nn.Module.to() may use, refuses to swap a tensor that something else refers to.
  void attach(size_t i, std::array<at::Tensor, 5> param_moments_step);
  // Lets go of all tensors, gradients included, but for dense copies.
  void release();

  // This step's gradient of an entry, undefined where it has none. A gradient with other strides
  // than its parameter is copied.
  void set_gradient(size_t i, const at::Tensor& gradient);

  void accumulate(const at::Tensor& accumulator) const;
  void update(const std::vector<GroupHyper>& groups, const at::Tensor& control);

  size_t size() const { return entries_.size(); }
  const at::Tensor& param(size_t i) const { return entries_[i].param; }
  at::Device device() const { return device_; }
  int64_t gradients_copied() const { return gradients_copied_; }

 private:
  std::string what(const char* role, size_t i) const;
  const at::Tensor& dense_param(size_t i) const;

  std::vector<Entry> entries_;
  std::vector<at::Tensor> dense_copies_;  // stepped instead of a parameter that is not dense
  std::vector<at::Tensor> gradients_;     // keeps this step's gradients alive
  WorkList work_;
  at::Device device_;
  int64_t gradients_copied_ = 0;
};

}  // namespace torchopt_ext

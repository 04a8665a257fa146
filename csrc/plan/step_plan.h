// A step plan: the parameters of one device with their state, checked once, and this step's
// gradients. Operators and optimizer classes both run their passes through it.
#pragma once

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

  // Whether every parameter and state tensor still has the memory the plan was built for.
  bool unchanged() const;

  // This step's gradient of an entry, undefined where it has none. A gradient with other strides
  // than its parameter is copied.
  void set_gradient(size_t i, const at::Tensor& gradient);
  void set_gradients(const std::vector<at::Tensor>& gradients);
  // The same with each parameter's .grad.
  void collect_gradients();
  void drop_gradients();

  void accumulate(const at::Tensor& accumulator) const;
  void update(const std::vector<GroupHyper>& groups, const at::Tensor& control);

  const std::vector<Entry>& entries() const { return entries_; }
  at::Device device() const { return device_; }
  int64_t gradients_copied() const { return gradients_copied_; }

 private:
  std::string what(const char* role, size_t i) const;

  std::vector<Entry> entries_;
  std::vector<at::Tensor> dense_params_;  // what is stepped: the parameter, or its dense copy
  std::vector<at::Tensor> gradients_;     // keeps this step's gradients alive
  WorkList work_;
  at::Device device_;
  int64_t gradients_copied_ = 0;
};

}  // namespace torchopt_ext

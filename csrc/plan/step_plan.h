// A step plan: the parameters of one device with their state, checked once, and this step's
// gradients. Operators and optimizer classes both run their passes through it.
//
// It owns none of the tensors it was given but this step's gradients: torch.utils.swap_tensors,
// which nn.Module.to() may use, rejects a tensor that something else refers to, and
// reference counting alone would take longer than a step over small tensors may. Whoever holds the
// plan keeps the tensors alive while one of its methods runs.
#pragma once

#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"
#include "work/work_list.h"

namespace torchopt_ext {

class StepPlan {
 public:
  // The tensors of a parameter by Array. Undefined: no amsgrad, no master, no scales. The master is
  // an fp32 master weight, or a remainder of int16 or int8. Scales go with int8 and uint8 moments.
  using Tensors = std::array<at::Tensor, kKept>;
  using Borrowed = std::array<c10::TensorImpl*, kKept>;  // null where undefined

  // Where a shard lies in its parameter: TensorWork says what the fields mean.
  struct Place {
    uint32_t index = 0;
    int64_t first_element = 0;
    int64_t run = 0;
    int64_t stride = 0;
  };

  struct Entry {
    Tensors tensors;
    bool copied = false;  // kMaster is the parameter, kParam its copy (weight_copy.h)
    int32_t group = 0;    // index into update()'s hyperparameters
    std::string name;     // for messages; may be empty
    size_t position = 0;  // for messages: index in the caller's list
    Place place;
  };

  // Checks shapes, dtypes, devices, strides and overlap. A parameter that is not dense is stepped
  // through a dense copy; the operators reject it beforehand. `read`: gradients, to check that none
  // lies in what is written.
  StepPlan(const std::vector<Entry>& entries, at::Device device, const StepOptions& options = {},
           at::TensorList read = {});

  // Notes where an entry's tensors are now; false if these are others than those known (not only
  // behind the same Python objects), or their memory, shape or type.
  // Entries may be attached by several threads at once.
  bool attach(size_t i, const Borrowed& tensors);

  // Takes what the entries' tensors are now, checked as at first. `changed` is in ascending order;
  // all tensors must be attached.
  void renew(const std::vector<size_t>& changed);

  // This step's gradient of an entry, undefined where it has none, if it is like the one before;
  // otherwise returns false, and set_gradient() is to look at it. Entries may be taken by several
  // threads at once, without Python's lock: the parameter refers to the gradient as well, so this
  // reference is never the first or the last beside Python's.
  bool take_gradient(size_t i, const at::Tensor& gradient);

  // The same for any gradient; one with other strides than its parameter is copied.
  void set_gradient(size_t i, const at::Tensor& gradient);

  // Raises if gradients that are to be written share memory with each other or with what a step
  // writes besides.
  void check_gradients_apart();

  // Makes the copies of parameters that have a gradient right: a step may be skipped. Takes
  // gradients into account that were taken; with Python's interpreter locked.
  void renew_copies() const;

  // Drops the gradients.
  void release();

  // Pass A over all gradients but those of the entries in `measured`.
  void accumulate(const at::Tensor& accumulator, bool normalize,
                  const std::vector<size_t>& measured = {});
  void update(const std::vector<GroupHyper>& groups, const at::Tensor& control);

  size_t size() const { return work_.tensors.size(); }
  at::Device device() const { return device_; }
  int64_t gradients_copied() const { return gradients_copied_; }
  const Traces& traces() const { return traces_; }

  // Asks the processor for the memory that attach() and set_gradient() of an entry will read.
  void prefetch(size_t i) const;

 private:
  // What is known of an entry besides its TensorWork. A step reads all of it.
  struct Known {
    Shape shape;  // of the parameter or its dense copy
    std::array<caffe2::TypeMeta, kKept> type;
    bool swapped = false;               // a tensor for another: torch.utils.swap_tensors
    bool strided = false;               // the parameter is not dense: see Strided
    c10::DispatchKeySet gradient_keys;  // of a gradient that needed no closer look
    int32_t gradient_type = -1;         // its ScalarType
    // For prefetch only: the last gradient, and what tensors refer to, storages and the parameter's
    // autograd data. Their addresses would take a read of each tensor to find.
    const c10::TensorImpl* gradient = nullptr;
    std::array<const void*, kKept + 2> behind{};
  };
  // A parameter that is not dense is stepped through a copy that is.
  struct Strided {
    at::Tensor copy;
    at::Tensor param;  // during a step in which it has a gradient
    const void* memory = nullptr;
    Shape shape;
  };
  struct Name {
    std::string name;
    size_t position;
  };

  Label what(const char* role, size_t i) const;
  const char* role(size_t part, size_t i) const;
  bool is_copied(size_t i) const;
  void check_entry(size_t i, const Tensors& tensors);
  void check_moments(size_t i, const Tensors& tensors, const at::Tensor& dense) const;
  void check_quantized(size_t i, const Tensors& tensors, const at::Tensor& dense) const;
  void check_overlap(at::TensorList gradients) const;
  void split_into_chunks();
  void find_shared_versions();
  void read_versions(size_t i, size_t end) const;
  void count_as_changed() const;
  void check_step(size_t i) const;

  WorkList work_;
  std::vector<Known> known_;
  std::vector<Borrowed> borrowed_;
  std::vector<at::Tensor> gradients_;            // keeps this step's gradients alive
  std::vector<const void*> apart_;               // where gradients were when they were apart
  std::unordered_map<size_t, Strided> strided_;  // by entry
  std::vector<size_t> copied_;                   // ascending: entries that are Entry::copied
  std::vector<Name> names_;
  Traces traces_;
  at::Device device_;
  int64_t gradients_copied_ = 0;
  // Whether an entry's tensor of a part has the version counter of the entry's before. Found at the
  // second update: an operator's plan has only one.
  std::vector<std::array<bool, kKept>> shares_version_;
  bool has_updated_ = false;
};

}  // namespace torchopt_ext

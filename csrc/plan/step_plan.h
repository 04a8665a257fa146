// A step plan: the parameters of one device with their state, checked once, and this step's
// gradients. Operators and optimizer classes both run their passes through a plan.
//
// A plan owns none of its tensors except this step's gradients:
// torch.utils.swap_tensors, which nn.Module.to() may use, rejects a tensor with other references,
// and reference counting alone would take longer than a step over small tensors may. The owner of a
// plan keeps the tensors alive while a method of the plan runs.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/algorithms.h"
#include "plan/for_each_entry.h"
#include "plan/orthogonal_update.h"
#include "plan/staged_update.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"
#include "work/work_list.h"

namespace torchopt_ext {

// The order of a step: collect(), renew() of the entries that changed, set_gradient() of the
// entries whose gradient collect() did not take; check_gradient_overlap(), renew_copies();
// accumulate() and the caller's control update; update(); release(). A new plan's entries need
// set_gradient() only.
class StepPlan {
 public:
  // A parameter's tensors by Array. Undefined tensors mean no such state, no master, no scales. The
  // master is an fp32 master weight or an int16 or int8 remainder. Only 8-bit moments have scales.
  using Tensors = std::array<at::Tensor, kPersistentArrays>;
  using TensorImpls = std::array<c10::TensorImpl*, kPersistentArrays>;  // null where undefined

  // The place of a shard in its parameter. TensorWork documents the fields.
  struct Place {
    uint32_t index = 0;
    int64_t first_element = 0;
    int64_t run = 0;
    int64_t stride = 0;
    int64_t rows = 0;
    int64_t gap = 0;
  };

  struct Entry {
    Tensors tensors;
    Algorithm algorithm{};
    bool copied = false;  // kMaster is the parameter, kParam its copy (weight_copy.h)
    int32_t group = 0;    // index into update()'s hyperparameters
    std::string name;     // for messages; may be empty
    size_t position = 0;  // for messages: index in the caller's list
    Place place;
    Orthogonalization orthogonalization;  // of an algorithm that writes directions
  };

  // Checks shapes, dtypes, devices, strides and overlap. A parameter that is not dense is stepped
  // through a dense copy; the operators reject such a parameter beforehand. `read`: gradients,
  // which must not share memory with the entries' tensors. `ring`: with one, states on the host are
  // staged.
  StepPlan(const std::vector<Entry>& entries, at::Device device, const StepOptions& options = {},
           at::TensorList read = {}, std::shared_ptr<StagingRing> ring = nullptr);

  // What an entry still needs after collect().
  enum class Pending : uint8_t { kNothing, kGradient, kTensorsChanged };

  // Compares every entry's current tensors with those recorded and takes its gradient, on all
  // threads: for most entries this only reads memory. read(i, tensors) fills in the tensors of
  // entry i and returns its gradient, or null to leave it pending. Several threads call it, without
  // the GIL. Returns false if renew() is needed.
  template <class Read>
  bool collect(const Read& read) {
    pending_.resize(size());
    for_each_entry(size(), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        if (i + kEntriesAhead < end) {
          prefetch(i + kEntriesAhead);
        }
        TensorImpls tensors;
        const at::Tensor* gradient = read(i, tensors);
        pending_[i] = !attach(i, tensors) ? Pending::kTensorsChanged
                      : gradient != nullptr && take_gradient(i, *gradient) ? Pending::kNothing
                                                                           : Pending::kGradient;
      }
    });
    return std::find(pending_.begin(), pending_.end(), Pending::kTensorsChanged) == pending_.end();
  }
  Pending pending(size_t i) const { return pending_[i]; }

  // Adopts the tensors of the `changed` entries, in ascending order, with the constructor's checks.
  void renew(const std::vector<size_t>& changed);

  // Takes any gradient of an entry. Copies a gradient whose strides differ from its parameter's.
  // Needs the GIL if the gradient may have a Python object.
  void set_gradient(size_t i, const at::Tensor& gradient);

  // Raises if gradients that the step writes back share memory with each other or with another
  // tensor that the step writes.
  void check_gradient_overlap();

  // Renews outdated copies of parameters that have a gradient, as a skipped step would not write
  // them. Needs the GIL.
  void renew_copies() const;

  // Drops the gradients. Needs the GIL if they may have Python objects.
  void release();

  // Allocates what update() needs on the device.
  void prepare();

  // Runs pass A.
  void accumulate(const at::Tensor& accumulator, bool normalize);
  void update(const std::vector<GroupHyper>& groups, const at::Tensor& control,
              const Exchange& exchange = {});

  size_t size() const { return work_.tensors.size(); }
  at::Device device() const { return device_; }
  // This step's gradient of an entry; undefined without one.
  const at::Tensor& gradient(size_t i) const { return gradients_[i]; }
  int64_t gradients_copied() const { return gradients_copied_; }
  const Traces& traces() const { return traces_; }
  bool orthogonalizes() const { return !orthogonalized_.empty(); }
  bool has_copies() const { return !copied_.empty(); }
  // Whether a step on the CPU takes no longer than Python lets a thread run, 5 ms by default.
  bool is_short() const {
    return device_.is_cpu() && !orthogonalizes() && work_.cumulative.back() <= 16 << 20;
  }

 private:
  // What the last checks recorded of an entry besides its TensorWork. A step reads all of them.
  struct Record {
    Shape shape;  // the parameter's or its dense copy's
    std::array<caffe2::TypeMeta, kPersistentArrays> type;
    bool impl_changed = false;          // a TensorImpl changed: torch.utils.swap_tensors
    bool non_dense = false;             // the parameter is not dense: see NonDense
    size_t by_row = 0;                  // the array with a value for each row; 0 without one
    int64_t rows = 0;                   // its elements
    c10::DispatchKeySet gradient_keys;  // the last gradient taken without a copy
    at::ScalarType gradient_type = at::ScalarType::Undefined;  // the same gradient's
    // For prefetch only: the last gradient, the tensors' storages and the parameter's autograd
    // data. Finding their addresses in the tensors would take a read of each tensor.
    const c10::TensorImpl* gradient = nullptr;
    std::array<const void*, kPersistentArrays + 2> prefetch_addresses{};
  };
  // A parameter that is not dense, and the dense copy through which it is stepped.
  struct NonDense {
    at::Tensor copy;
    at::Tensor param;  // during a step in which it has a gradient
    const void* memory = nullptr;
    Shape shape;
  };
  struct Name {
    std::string name;
    size_t position;
    Algorithm algorithm;
  };

  // Records an entry's current tensors. Returns false if a TensorImpl (also one swapped behind the
  // same Python object), its memory, shape or dtype differs from the recorded one (of the step
  // count only the memory).
  bool attach(size_t i, const TensorImpls& tensors);
  // Takes a gradient, which may be undefined. Returns false if it is not like the gradient before.
  // Needs no GIL: the parameter also refers to the gradient, so this reference is never the first
  // or last reference besides Python's.
  bool take_gradient(size_t i, const at::Tensor& gradient);
  // Prefetches the memory of an entry that attach() and take_gradient() read.
  void prefetch(size_t i) const;

  Label what(size_t array, size_t i) const;
  bool is_copied(size_t i) const;
  void check_entry(size_t i, const Tensors& tensors);
  void check_matrices(size_t i, const Tensors& tensors, const at::Tensor& dense) const;
  void check_states(size_t i, const Tensors& tensors, const at::Tensor& dense) const;
  void check_overlap(at::TensorList gradients) const;
  void set_kind(size_t i);
  void split_into_chunks();
  void find_shared_versions();
  void read_versions(size_t i, size_t end) const;
  void end_update();
  void check_step_count(size_t i) const;

  WorkList work_;
  std::vector<Record> records_;
  std::vector<TensorImpls> borrowed_;
  std::vector<Pending> pending_;
  std::vector<at::Tensor> gradients_;  // keeps this step's gradients alive
  // Gradients that set_gradient() took, until release(): to drop a gradient's last reference
  // besides Python's takes the GIL and may run a finalizer.
  std::vector<at::Tensor> set_gradients_;
  std::vector<const void*> checked_gradients_;      // gradient addresses that passed the check
  std::unordered_map<size_t, NonDense> non_dense_;  // by entry
  std::vector<size_t> copied_;                      // entries with Entry::copied, ascending
  std::vector<Name> names_;
  std::unordered_map<size_t, Orthogonalization> orthogonalized_;  // by entry
  std::unique_ptr<OrthogonalUpdate> orthogonal_;  // of the work list as it is, if it was prepared
  std::shared_ptr<StagingRing> ring_;
  StagedUpdate staged_;
  Traces traces_;
  at::Device device_;
  int64_t gradients_copied_ = 0;
  // By entry and array: whether the tensor shares its version counter with the previous entry's.
  // Found at the second update, as an operator's plan makes only one update.
  std::vector<std::array<bool, kPersistentArrays>> shares_version_;
  bool has_updated_ = false;
};

}  // namespace torchopt_ext

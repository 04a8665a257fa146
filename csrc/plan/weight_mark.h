// Shows whether user code has written to a 16-bit weight, which its fp32 master then follows.
#pragma once

#include <ATen/ops/where.h>

#include <array>
#include <vector>

#include "plan/tensor_fields.h"

namespace torchopt_ext {

// What of a weight changes with a write: its memory and how it is read (`param.data = ...`), and
// its version counters. Operators on a DTensor count on the DTensor, operators on its shard on the
// shard. Keeps counters and the storage's empty object, but no memory: other memory may get the
// weight's address, and no other storage or weight ever fits. A tensor of inference mode never
// fits.
class WeightMark {
 public:
  // `param`: the shard itself, or the DTensor or other wrapper subclass around it.
  WeightMark(const c10::TensorImpl& param, const c10::TensorImpl& shard)
      : memory_(address(shard)),
        dtype_(shard.dtype()),
        strides_(shard.strides().begin(), shard.strides().end()),
        storage_(shard.unsafe_storage().getWeakStorageImpl()),
        counters_{param.version_counter(), shard.version_counter()} {
    renew();
  }
  bool fits(const c10::TensorImpl& param, const c10::TensorImpl& shard) const {
    return address(shard) == memory_ && shard.dtype() == dtype_ && shard.strides() == strides_ &&
           shard.unsafe_storage().unsafeGetStorageImpl() == storage_._unsafe_get_target() &&
           shares_version(counters_[0], param.version_counter()) &&
           shares_version(counters_[1], shard.version_counter()) && versions() == versions_;
  }
  void renew() { versions_ = versions(); }  // after a step has written to the weight

 private:
  uint64_t versions() const {  // grows with every write
    return !counters_[0].enabled() || !counters_[1].enabled()
               ? 0
               : uint64_t{counters_[0].current_version()} + counters_[1].current_version();
  }
  const void* memory_;
  caffe2::TypeMeta dtype_;
  c10::SmallVector<int64_t, 4> strides_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::array<c10::VariableVersion, 2> counters_;
  uint64_t versions_ = 0;
};

// For Python.
struct WeightMarks {
  std::vector<WeightMark> marks;
};

// Returns a master whose elements that do not round to the weight are the weight's. The others keep
// their bits. Leaves a tensor that cannot be compared to the checks of a step, which name it.
inline at::Tensor followed(const at::Tensor& master, const at::Tensor& weight) {
  if (address(*master.unsafeGetTensorImpl()) == nullptr || master.sizes() != weight.sizes() ||
      address(*weight.unsafeGetTensorImpl()) == nullptr) {
    return master;
  }
  const at::Tensor now = weight.detach().to(master.device());
  return at::where(master.to(now.scalar_type()).eq(now), master, now);
}
inline void take_weight(const at::Tensor& master, const at::Tensor& weight) {
  master.copy_(followed(master, weight));
}

}  // namespace torchopt_ext

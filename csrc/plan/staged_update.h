// Pass B of a work list. States in the host's memory are used there, through the link, or, if the
// step stages them, in slots of the device's memory (work/staging.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "work/passes.h"

namespace torchopt_ext {

// The slots and streams that the plans of an optimizer use in turn on one device.
struct StagingRing {
  // The bytes of a slot that hold any chunk: 4,096 elements, or a shorter row, of five arrays of
  // eight bytes.
  static constexpr int64_t kLeast = int64_t{256} << 10;

  explicit StagingRing(int64_t bytes)
      : slot_bytes(static_cast<int64_t>(
            SlotLayout::aligned(static_cast<size_t>(std::max(bytes, kLeast))))) {}

  char* memory() const { return static_cast<char*>(slots.mutable_data_ptr()); }

  int64_t slot_bytes;
  at::Tensor slots;  // from the first prepare() on
  std::unique_ptr<StagingStreams> streams;
};

class StagedUpdate {
 public:
  // Without a ring nothing is staged. The list is cut into buckets at the first prepare(), and
  // again after reset().
  explicit StagedUpdate(std::shared_ptr<StagingRing> ring = nullptr) : ring_(std::move(ring)) {}

  // As Passes::prepare() and Passes::update(). A staged step fills no traces.
  void prepare(const WorkList& work, at::Device device);
  void update(const WorkList& work, const std::vector<GroupHyper>& groups,
              const at::Tensor& control, const Traces& traces);
  void reset() { staged_.reset(); }

 private:
  // A part of the plan's work list.
  struct Pass {
    WorkList work;
    std::vector<size_t> tensors;  // of the plan, by tensor of `work`
  };
  struct Staged {
    Pass counted;  // all tensors: advances the step counts, and steps those that are not staged
    std::vector<Pass> buckets;
    std::vector<std::vector<StagedCopy>> copies;  // by bucket
  };

  void fill(const WorkList& work);
  void add_bucket(const WorkList& work, const std::vector<Chunk>& pieces);

  std::shared_ptr<StagingRing> ring_;
  std::unique_ptr<Staged> staged_;
};

}  // namespace torchopt_ext

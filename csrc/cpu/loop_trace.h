// Tracking inside the loops of pass B (kernels/trace.h): records the change of each stored weight
// and counts the lost updates, which leave their weight unchanged.
#pragma once

#include "cpu/adam_loop.h"

namespace torchopt_ext {
namespace {

// `change` first holds the weights before the update, then their changes. Its first element belongs
// to element `origin` of the tensor.
template <class Scalar>
class LoopTrace {
 public:
  LoopTrace(int64_t origin, Scalar* change) : origin_(origin), change_(change) {}

  template <class Lane>
  [[gnu::always_inline]] void before(const Lane& lane, const Layout& layout,
                                     void* const (&x)[kArrays], int64_t i) const {
    lane.store(change_ + (i - origin_), load_weight(lane, layout, x, i));
  }
  template <class Lane>
  [[gnu::always_inline]] void after(const Lane& lane, const Layout& layout,
                                    void* const (&x)[kArrays], int64_t i, bool decays) {
    const auto before = lane.load(change_ + (i - origin_));
    const auto after = load_weight(lane, layout, x, i);
    lane.store(change_ + (i - origin_), Lane::sub(after, before));
    lost_ += Lane::count_lost(before, after, load_exp_avg(lane, layout, x, i), decays);
  }
  int64_t lost() const { return lost_; }

 private:
  int64_t origin_;
  Scalar* change_;
  int64_t lost_ = 0;
};

}  // namespace
}  // namespace torchopt_ext

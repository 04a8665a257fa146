// Sets the floating-point mode the numerics need (round to nearest even, subnormals kept) and
// restores the caller's. The control register belongs to a thread: torch.set_flush_denormal
// reaches only the thread that calls it, so every worker sets its own.
#pragma once

#include <immintrin.h>

namespace torchopt_ext {
namespace {

class FloatMode {
 public:
  FloatMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kNearestNoFlushMasked = 0x1f80;
    _mm_setcsr(kNearestNoFlushMasked);
  }
  ~FloatMode() { _mm_setcsr(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_;
};

}  // namespace
}  // namespace torchopt_ext

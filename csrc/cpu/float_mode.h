// Sets the floating-point mode the numerics need (round to nearest even, subnormals kept) and
// restores the caller's. The control register belongs to a thread: torch.set_flush_denormal
// reaches only the thread that calls it, so every worker sets its own.
#pragma once

#include <cstdint>
#ifdef __x86_64__
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "torchopt_ext knows the floating-point control registers of x86-64 and aarch64 only"
#endif

namespace torchopt_ext {
namespace {

class FloatMode {
 public:
  FloatMode() { set_control(kNearestNoFlushMasked); }
  ~FloatMode() { set_control(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#ifdef __x86_64__
  static constexpr uint32_t kNearestNoFlushMasked = 0x1f80;
  static uint32_t control() { return _mm_getcsr(); }
  static void set_control(uint32_t value) { _mm_setcsr(value); }
#else
  // FPCR: a NaN keeps its payload, and neither FZ, FZ16 nor FIZ flushes.
  static constexpr uint64_t kNearestNoFlushMasked = 0;
  static uint64_t control() {
    uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set_control(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#endif
  const decltype(control()) saved_ = control();
};

}  // namespace
}  // namespace torchopt_ext

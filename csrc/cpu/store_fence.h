// Orders a thread's stores past the caches (the lanes' `stream`) before what it stores later:
// without it another thread may see that a pass has ended before it sees the pass's values.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace torchopt_ext {

inline void store_fence() {
#ifdef __x86_64__
  _mm_sfence();
#endif  // ScalarLane's stores are ordinary ones
}

}  // namespace torchopt_ext

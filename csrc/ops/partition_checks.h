// Checks of the partition operators' common arguments, and the default of one.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace torchopt_ext {

// Sums up to this many elements are exact as doubles and far below the largest int64_t.
inline constexpr int64_t kMaxElements = int64_t{1} << 53;
inline constexpr int64_t kInt32End = int64_t{1} << 31;

// Returns the default bucket size. It makes a collective worthwhile, and the two blocks (of 4,096
// elements) by which shares of ranks differ are at most 0.8% of a share.
inline int64_t default_bucket_elements(int64_t world_size) {
  return std::max(int64_t{1} << 23, world_size << 20);
}

inline void check_world_size(int64_t world_size) {
  TORCH_CHECK_VALUE(world_size > 0 && world_size < kInt32End, "world_size is ", world_size,
                    ", expected 1 or more and less than 2**31");
}

// Raises if `sum` plus all numels exceeds `most`. The message ends with `limit`.
inline void check_numels(at::IntArrayRef numels, int64_t sum = 0, int64_t most = kMaxElements,
                         const char* limit = "all numels together are more than 2**53") {
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(numels[i] >= 0, "numels[", i, "] is ", numels[i], ", expected 0 or more");
    TORCH_CHECK_VALUE(numels[i] <= most - sum, "numels[", i, "] is ", numels[i], ": ", limit);
    sum += numels[i];
  }
}

}  // namespace torchopt_ext

// The index arithmetic of vector accesses, exhaustively over small sizes and all alignments.
#include "cuda/vector_range.h"

#include <gtest/gtest.h>

#include <vector>

namespace torchopt_ext {
namespace {

constexpr int64_t kWidths[] = {1, 2, 4, 8};

// Each element once, whatever the number of threads; no group outside of the range's groups.
void expect_each_element_once(const VectorRange& range, int64_t width, int64_t begin, int64_t end) {
  for (const int threads : {1, 3, 32}) {
    std::vector<int> seen(static_cast<size_t>(end - begin), 0);
    for (int thread = 0; thread < threads; ++thread) {
      for_each_access(
          range, width, begin, end, thread, threads,
          [&](int64_t i) {
            ASSERT_GE(i, range.begin);
            ASSERT_LE(i + width, range.end);
            ASSERT_EQ((i - range.begin) % width, 0);
            for (int64_t k = i; k < i + width; ++k) {
              ++seen.at(static_cast<size_t>(k - begin));
            }
          },
          [&](int64_t i) { ++seen.at(static_cast<size_t>(i - begin)); });
    }
    for (const int count : seen) {
      ASSERT_EQ(count, 1);
    }
  }
}

TEST(VectorRange, OneArrayIsAlwaysAlignedAndOnlyHeadAndTailAreNot) {
  for (const int64_t size : {2, 4, 8}) {
    for (const int64_t width : kWidths) {
      for (int64_t misaligned = 0; misaligned < width; ++misaligned) {
        for (int64_t begin = 0; begin < 3; ++begin) {
          for (int64_t n = 0; n <= 40; ++n) {
            const auto address = static_cast<uint64_t>(4096 + misaligned * size);
            const VectorRange range = vector_range({address}, {size}, width, begin, begin + n);
            expect_each_element_once(range, width, begin, begin + n);
            ASSERT_EQ((range.end - range.begin) % width, 0);
            if (range.begin < range.end) {
              ASSERT_TRUE(is_aligned(address + static_cast<uint64_t>((range.begin - begin) * size),
                                     width * size));
            }
            const int64_t single = n - (range.end - range.begin);
            ASSERT_TRUE(single <= 2 * (width - 1) || range.begin == range.end);
            ASSERT_LE(single, 2 * (width - 1));
          }
        }
      }
    }
  }
}

// The head leaves as many bytes aligned as any could.
TEST(VectorRange, SeveralArraysAreAlignedByMostBytes) {
  const int64_t sizes[3] = {4, 2, 4};
  for (const int64_t width : kWidths) {
    for (int64_t a = 0; a < width; ++a) {
      for (int64_t b = 0; b < width; ++b) {
        for (int64_t c = 0; c < width; ++c) {
          for (const int64_t n : {0, 1, 7, 8, 15, 16, 33}) {
            const uint64_t addresses[3] = {static_cast<uint64_t>(256 + 4 * a),
                                           static_cast<uint64_t>(512 + 2 * b),
                                           static_cast<uint64_t>(1024 + 4 * c)};
            const VectorRange range = vector_range(addresses, sizes, width, 0, n);
            expect_each_element_once(range, width, 0, n);
            const auto aligned_bytes = [&](int64_t head) {
              int64_t bytes = 0;
              for (int i = 0; i < 3; ++i) {
                const auto at = addresses[i] + static_cast<uint64_t>(head * sizes[i]);
                bytes += at % static_cast<uint64_t>(width * sizes[i]) == 0 ? sizes[i] : 0;
              }
              return bytes;
            };
            for (int64_t head = 0; range.begin < range.end && head < width; ++head) {
              ASSERT_GE(aligned_bytes(range.begin), aligned_bytes(head));
            }
          }
        }
      }
    }
  }
}

TEST(VectorRange, AnAbsentArrayDoesNotCount) {
  const VectorRange range = vector_range({0x1004, 0x1000}, {4, 0}, 4, 0, 100);
  EXPECT_EQ(range.begin, 3);
  EXPECT_EQ(range.end, 99);
}

}  // namespace
}  // namespace torchopt_ext

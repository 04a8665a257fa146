// Tests the index arithmetic of CUDA threads' registers, exhaustively over small sizes and all
// alignments.
#include "cuda/vector.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/kinds.h"

namespace torchopt_ext {
namespace {

// Expects each element once for any number of threads, and whole registers within the range.
void expect_each_element_once(const AlignedRange& registers, int width, int n) {
  for (const int threads : {1, 3, 32}) {
    std::vector<int> seen(static_cast<size_t>(n), 0);
    for (int thread = 0; thread < threads; ++thread) {
      for_each_register(
          registers, width, n, thread, threads,
          [&](int i) {
            ASSERT_GE(i, registers.begin);
            ASSERT_LE(i + width, registers.end);
            ASSERT_EQ((i - registers.begin) % width, 0);
            for (int k = i; k < i + width; ++k) {
              ++seen.at(static_cast<size_t>(k));
            }
          },
          [&](int i) { ++seen.at(static_cast<size_t>(i)); });
    }
    for (const int count : seen) {
      ASSERT_EQ(count, 1);
    }
  }
}

alignas(64) char memory[1024];  // only its addresses matter

void* at(int64_t offset) { return memory + offset; }

// Registers start at the first element where all arrays are aligned; less than a register is left.
TEST(AlignedRange, StartWhereEveryArrayIsAligned) {
  struct Way {
    Kind kind;
    int width;
  };
  for (const Way way :
       {Way{AdamKind::kFloat32, 4}, Way{AdamKind::kFloat64, 2}, Way{AdamKind::kBFloat16, 8},
        Way{AdamKind::kBFloat16Master, 8}, Way{AdamKind::kBFloat16Remainder, 8}}) {
    const Layout layout = traits_of(way.kind).layout;
    const bool master = layout.master != Master::kNone;
    for (int offset = 0; offset < 2 * way.width; ++offset) {
      for (int moved = 0; moved < way.width; ++moved) {  // the gradient's extra offset
        for (int n = 0; n <= 40; ++n) {
          void* x[kArrays] = {};
          for (const Array array : {kParam, kExpAvg, kExpAvgSq, kGrad}) {
            const int first = offset + (array == kGrad ? moved : 0);
            x[array] = at(first * element_size(layout, array));
          }
          if (master) {
            x[kMaster] = at(offset * element_size(layout, kMaster));
          }
          const AlignedRange registers = aligned_registers(layout, x, way.width, n);
          expect_each_element_once(registers, way.width, n);
          const int head = (2 * way.width - offset) % way.width;
          const bool some = moved == 0 && head + way.width <= n;
          ASSERT_EQ(registers.end - registers.begin, some ? (n - head) / way.width * way.width : 0);
          ASSERT_TRUE(!some || registers.begin == head);
        }
      }
    }
  }
}

TEST(AlignedRange, NarrowerArraysNeedLessAlignment) {
  const Layout layout{.param = DType::kFloat32, .grad = DType::kBFloat16};
  void* x[kArrays] = {};
  x[kParam] = at(0);
  x[kGrad] = at(8);  // four bf16 elements are 8 bytes
  EXPECT_EQ(aligned_registers(layout, x, 4, 100).end, 100);
  x[kGrad] = at(4);
  EXPECT_EQ(aligned_registers(layout, x, 4, 100).end, 0);
}

}  // namespace
}  // namespace torchopt_ext

// The bitwise contract of the scaled copy: every instruction set's kernel and the body of the CUDA
// kernel give the same bits, whatever the types and wherever the arrays start.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/copy.h"
#include "host_cta.h"
#include "support.h"

namespace torchopt_ext {
namespace {

using Memory = std::vector<unsigned char>;
constexpr int64_t kSlack = 32;  // elements around the copied elements

struct Pair {
  DType to;
  DType from;
};

std::vector<Pair> every_pair() {
  std::vector<Pair> pairs;
  for (const DType to : kAllDTypes) {
    for (const DType from : kAllDTypes) {
      if (can_copy(to, from)) {
        pairs.push_back({to, from});
      }
    }
  }
  return pairs;
}

// Returns `n` elements, a third of which have random bit patterns.
Memory elements_of(DType dtype, int64_t n, unsigned seed) {
  Memory memory = random_elements(dtype, n, 20, seed);
  std::mt19937 random(seed);
  const int64_t size = element_size(dtype);
  for (int64_t i = 0; i < n; i += 3) {
    for (int64_t b = 0; b < size; ++b) {
      memory[static_cast<size_t>(i * size + b)] = static_cast<unsigned char>(random());
    }
    if (i % 2 == 0) {  // infinities, NaNs
      memory[static_cast<size_t>(i * size + size - 1)] |= 0x7f;
      memory[static_cast<size_t>(i * size + size - 2)] |= dtype == DType::kFloat64 ? 0xf0 : 0x80;
    }
  }
  return memory;
}

struct Case {
  Pair types;
  int64_t n;
  int64_t to_offset;
  int64_t from_offset;
  double factor;
};

Memory by_table(const KernelTable& table, const Case& c, Memory to, const Memory& from,
                bool past_caches) {
  const auto [to_type, from_type] = c.types;
  table.scaled_copy[static_cast<int>(to_type)][static_cast<int>(from_type)](
      to.data() + c.to_offset * element_size(to_type),
      from.data() + c.from_offset * element_size(from_type), c.factor, c.n, past_caches);
  return to;
}

// `from` is null for a copy in place.
Memory by_cuda(const Case& c, const Control& control, bool unscale, Memory to, const Memory* from,
               int threads) {
  TensorWork work{};
  work.memory[kParam] = to.data() + c.to_offset * element_size(c.types.to);
  work.memory[kGrad] = work.memory[kParam];
  if (from != nullptr) {
    work.memory[kGrad] = const_cast<unsigned char*>(from->data()) +
                         c.from_offset * element_size(c.types.from);  // read only
  }
  work.numel = c.n;
  work.row_length = 1;
  work.layout.param = c.types.to;
  work.layout.grad = c.types.from;
  std::vector<Chunk> chunks;
  add_plain_chunks({work}, [](const TensorWork&) { return 4096; }, chunks);
  run_on_host(CopyKernel{{}, &work, chunks.data(), &control, unscale},
              static_cast<int64_t>(chunks.size()), threads);
  return to;
}

void expect_same_bits(const Case& c) {
  const Memory to = random_elements(c.types.to, c.n + kSlack, 3, 5);
  const Memory from = elements_of(c.types.from, c.n + kSlack, static_cast<unsigned>(c.n) + 7);
  const Memory expected = by_table(default_kernels(), c, to, from, false);
  for (const KernelTable* table : runnable_tables()) {
    for (const bool past_caches : {false, true}) {
      ASSERT_EQ(by_table(*table, c, to, from, past_caches), expected) << table->name;
    }
  }
  Control control{};
  control.grad_factor = c.factor;
  for (const int threads : {32, 256}) {
    ASSERT_EQ(by_cuda(c, control, true, to, &from, threads), expected);
  }
  // Nothing outside of the elements is written.
  const auto size = static_cast<size_t>(element_size(c.types.to));
  const auto begin = static_cast<ptrdiff_t>(static_cast<size_t>(c.to_offset) * size);
  const auto end = begin + static_cast<ptrdiff_t>(static_cast<size_t>(c.n) * size);
  ASSERT_TRUE(std::equal(to.begin(), to.begin() + begin, expected.begin()));
  ASSERT_TRUE(std::equal(to.begin() + end, to.end(), expected.begin() + end));
}

TEST(ScaledCopy, SameBitsForEveryPairOfTypesAndLength) {
  for (const Pair types : every_pair()) {
    for (const int64_t n : {1, 7, 8, 16, 31, 33, 64, 1000, 9001}) {
      for (const double factor : {1.0, 0.37, 0x1p-24, 3e38}) {
        expect_same_bits({types, n, 0, 0, factor});
        if (HasFatalFailure()) {
          FAIL() << static_cast<int>(types.to) << " from " << static_cast<int>(types.from) << " x "
                 << n << " by " << factor;
        }
      }
    }
  }
}

TEST(ScaledCopy, SameBitsWhereverArraysStart) {
  for (const Pair types : every_pair()) {
    for (const int64_t n : {3, 45, 100}) {
      for (int64_t to = 0; to < 16; ++to) {
        for (int64_t from = 0; from < 16; ++from) {
          expect_same_bits({types, n, to, from, 0.3});
          if (HasFatalFailure()) {
            FAIL() << static_cast<int>(types.to) << " + " << to << " from "
                   << static_cast<int>(types.from) << " + " << from << " x " << n;
          }
        }
      }
    }
  }
}

TEST(ScaledCopy, InPlace) {
  for (const DType dtype : kAllDTypes) {
    const Case c{{dtype, dtype}, 777, 3, 3, 0.3};
    const Memory start = elements_of(dtype, c.n + kSlack, 3);
    Control control{};
    control.grad_factor = c.factor;
    const Memory expected = by_table(default_kernels(), c, start, start, false);
    EXPECT_EQ(by_cuda(c, control, true, start, nullptr, 256), expected);
    for (const KernelTable* table : runnable_tables()) {
      Memory memory = start;
      const auto d = static_cast<int>(dtype);
      unsigned char* x = memory.data() + c.to_offset * element_size(dtype);
      table->scaled_copy[d][d](x, x, c.factor, c.n, false);
      EXPECT_EQ(memory, expected) << table->name;
    }
    // A copy in place without a factor is a no-op: not even a NaN changes its bits.
    EXPECT_EQ(by_cuda(c, control, false, start, nullptr, 256), start);
    control.grad_factor = 1.0;
    EXPECT_EQ(by_cuda(c, control, true, start, nullptr, 256), start);
  }
}

TEST(ScaledCopy, ASkippedStepChangesNothingInTheCudaBody) {
  Control control{};
  control.grad_factor = 0.5;
  control.skip = 1.0;
  const Case c{{DType::kFloat32, DType::kBFloat16}, 5000, 0, 0, 0.5};
  const Memory to = random_elements(c.types.to, c.n, 3, 1);
  const Memory from = elements_of(c.types.from, c.n, 2);
  for (const bool unscale : {false, true}) {
    EXPECT_EQ(by_cuda(c, control, unscale, to, &from, 256), to);
  }
}

}  // namespace
}  // namespace torchopt_ext

// Digests are the sum that numerics.md defines, on every instruction set and by the CUDA body,
// wherever arrays begin and shards are cut.
#include "kernels/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/digest.h"
#include "host_cta.h"
#include "support.h"
#include "work/work_list.h"

namespace torchopt_ext {
namespace {

// Returns the digest of element i: its bytes' parts of halves times their factors.
uint64_t digest_of_element(const DigestArray& array, int64_t i) {
  const auto size = element_size(array.layout.param);
  const auto* const memory = static_cast<const uint8_t*>(array.memory[kParam]) + i * size;
  const auto word = [&](int64_t at) {
    uint32_t bits = 0;
    std::memcpy(&bits, memory + at, 4);
    return uint64_t{bits};
  };
  const auto wide = [](int32_t factor) { return static_cast<uint64_t>(int64_t{factor}); };
  const int64_t in_row = array.row_length == 0 ? 0 : i % array.row_length;
  const int64_t number = global_element(array, i);
  const uint32_t base = digest_base(array.index, number - in_row % kQuantGroup);
  if (size == 8) {
    return wide(element_factor(base, number)) *
           (word(0) * role_factor(array.group) + word(4) * role_factor(array.group + 5));
  }
  const int64_t in_segment = number % kDigestSegment;
  uint64_t sum = 0;
  for (int64_t byte = in_segment * size; byte < (in_segment + 1) * size; ++byte) {
    const int bits = memory[byte - in_segment * size];
    const int part = byte % 2 == 0 ? bits : static_cast<int8_t>(bits) * 256;
    const int32_t upper = upper_half_factor(static_cast<uint32_t>(byte / 4));
    const int32_t half = byte % 4 < 2 ? 2048 - upper : upper;
    const int32_t lane = element_factor(base, number - in_segment + byte / 4 % kDigestLanes);
    sum += wide(part) * wide(half) * wide(lane);
  }
  return sum * role_factor(array.group);
}

uint64_t digest_as_cuda(const DigestArray& array) {
  std::vector<Chunk> chunks;
  add_plain_chunks({array}, [](const TensorWork&) { return kDigestChunk; }, chunks);
  int64_t digest = 0;
  const auto count = static_cast<int64_t>(chunks.size());
  run_on_host(DigestKernel{{}, &array, chunks.data(), count, &digest}, count / 2 + 1, 64);
  return static_cast<uint64_t>(digest);
}

void expect_digest(const DigestArray& array, uint64_t expected) {
  for (const KernelTable* table : runnable_tables()) {
    const int64_t cut = array.numel / 3;
    ASSERT_EQ(table->digest(array, 0, array.numel), expected) << table->name;
    ASSERT_EQ(table->digest(array, 0, cut) + table->digest(array, cut, array.numel), expected);
  }
  ASSERT_EQ(digest_as_cuda(array), expected);
}

uint64_t digest(const DigestArray& array) {
  return default_kernels().digest(array, 0, array.numel);
}

constexpr DType kSizes[] = {DType::kInt8, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

// An array of a size, `offset` elements into its memory.
struct Array8 {
  Array8(DType type, int64_t n, int offset = 0)
      : memory(random_elements(type, n + offset, 100, 3)) {
    work.layout.param = type;
    work.numel = n;
    work.index = 7;
    work.group = 2;
    work.memory[kParam] = memory.data() + offset * element_size(type);
  }
  std::vector<unsigned char> memory;
  DigestArray work{};
};

TEST(Digest, IsTheSumOfItsElements) {
  for (const DType type : kSizes) {
    for (const int offset : {0, 1, 2, 3}) {
      for (const int64_t n : {1, 5, 127, 2000, 20001}) {
        for (const int64_t first : {int64_t{0}, int64_t{3}, kStreamElements - 517}) {
          for (const int64_t row : {0, 90}) {  // rows of 90 elements with 8-bit moments, or none
            for (const int64_t run : {0, 270}) {
              Array8 array(type, n, offset);
              array.work.first_element = first;
              array.work.row_length = row;
              array.work.run = run;
              array.work.stride = 4 * run;
              uint64_t sum = 0;
              for (int64_t i = 0; i < n; ++i) {
                sum += digest_of_element(array.work, i);
              }
              expect_digest(array.work, sum);
            }
          }
        }
      }
    }
  }
}

TEST(Digest, ScalesHaveTheFactorOfTheirGroupsFirstElement) {
  Array8 scales(DType::kFloat32, 3 * 40);
  scales.work.group = kFirstScaleRole;
  scales.work.row_length = 130;  // groups of 64, 64 and 2 elements
  scales.work.first_element = kStreamElements - 260;
  uint64_t sum = 0;
  for (int64_t i = 0; i < scales.work.numel; ++i) {
    const int64_t number = scales.work.first_element + i / 3 * 130 + i % 3 * 64;
    uint32_t bits = 0;
    std::memcpy(&bits, scales.memory.data() + 4 * i, 4);
    sum += bits * static_cast<uint64_t>(int64_t{element_factor(digest_base(7, number), number)});
  }
  expect_digest(scales.work, sum * role_factor(kFirstScaleRole));
}

// Splits 12 rows of 90 elements by flat intervals, columns, and boxes of 3 of 6 rows.
TEST(Digest, ShardsAddUp) {
  struct Shard {
    int64_t numel, first, run, stride, rows, gap;
  };
  const std::vector<std::vector<Shard>> splits{{{33, 0, 0, 0, 0, 0}, {1047, 33, 0, 0, 0, 0}},
                                               {{384, 0, 32, 90, 0, 0}, {696, 32, 58, 90, 0, 0}},
                                               {{198, 0, 33, 90, 3, 270},
                                                {342, 33, 57, 90, 3, 270},
                                                {198, 270, 33, 90, 3, 270},
                                                {342, 303, 57, 90, 3, 270}}};
  for (const DType type : kSizes) {
    for (const auto& split : splits) {
      const Array8 whole(type, 1080);
      const auto size = static_cast<size_t>(element_size(type));
      uint64_t sum = 0;
      for (const Shard& place : split) {
        Array8 shard(type, place.numel);
        shard.work.first_element = place.first;
        shard.work.run = place.run;
        shard.work.stride = place.stride;
        shard.work.rows = place.rows;
        shard.work.gap = place.gap;
        for (int64_t i = 0; i < place.numel; ++i) {
          const auto from = static_cast<size_t>(global_element(shard.work, i));
          std::memcpy(shard.memory.data() + static_cast<size_t>(i) * size,
                      whole.memory.data() + from * size, size);
        }
        sum += digest(shard.work);
        expect_digest(shard.work, digest(shard.work));
      }
      EXPECT_EQ(sum, digest(whole.work));
    }
  }
}

// Every half is -2**15, where the sums of threads come closest to the limits of 32 bits.
TEST(Digest, ExtremeHalves) {
  for (const DType type : kSizes) {
    Array8 array(type, 3000);
    for (size_t i = 0; i < array.memory.size(); ++i) {
      array.memory[i] = i % 2 == 0 ? 0 : 0x80;
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < array.work.numel; ++i) {
      sum += digest_of_element(array.work, i);
    }
    expect_digest(array.work, sum);
  }
}

TEST(Digest, EveryFlippedBitShows) {
  for (const DType type : kSizes) {
    Array8 array(type, 70);
    array.work.first_element = 480;
    const uint64_t before = digest(array.work);
    for (unsigned char& byte : array.memory) {
      for (int bit = 0; bit < 8; ++bit) {
        byte ^= static_cast<unsigned char>(1u << bit);
        ASSERT_NE(digest(array.work), before);
        byte ^= static_cast<unsigned char>(1u << bit);
      }
    }
  }
}

TEST(Digest, PlacesAndRolesAndParametersDiffer) {
  std::vector<uint64_t> seen;
  float one = 1.0f;
  for (const uint32_t parameter : {0u, 1u, 1000u}) {
    for (int64_t element = 0; element < 100; ++element) {
      for (int role = 0; role < kFirstScaleRole; ++role) {
        DigestArray array{};
        array.memory[kParam] = &one;
        array.numel = 1;
        array.index = parameter;
        array.first_element = element;
        array.group = role;
        seen.push_back(digest(array));
      }
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
}

// Distinct factors reveal exchanged halves. The two factors of a word add up to 2048.
TEST(Digest, FactorsOfHalvesDifferAndAreOdd) {
  std::vector<int> factors;
  for (uint32_t word = 0; word < kDigestSegment; ++word) {
    EXPECT_EQ(upper_half_factor(word) % 2, 1);
    factors.push_back(upper_half_factor(word));
    factors.push_back(2048 - upper_half_factor(word));
  }
  std::sort(factors.begin(), factors.end());
  EXPECT_EQ(std::unique(factors.begin(), factors.end()), factors.end());
}

TEST(Digest, FactorsOfLanesDifferAndAreOdd) {
  std::vector<int32_t> factors;
  for (int64_t segment = 0; segment < 1 << 13; ++segment) {
    for (int word = 0; word < kDigestLanes; ++word) {
      factors.push_back(element_factor(digest_base(0, 0), segment * kDigestSegment + word));
      EXPECT_EQ(factors.back() & 1, 1);
    }
  }
  std::sort(factors.begin(), factors.end());
  // The lowest bit is always 1: about 2**16 * 2**16 / 2**32 = 1 pair of factors becomes equal.
  EXPECT_GE(std::unique(factors.begin(), factors.end()) - factors.begin(), (1 << 16) - 8);
}

}  // namespace
}  // namespace torchopt_ext

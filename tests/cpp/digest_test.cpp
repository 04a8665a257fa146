// The digest changes with any flipped bit, and differs between places, arrays and parameters.
// place_test.cpp tests that shards add up to the whole on every instruction set.
#include "kernels/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace torchopt_ext {
namespace {

// One element of each array, 8 bytes each.
struct Element {
  explicit Element(uint64_t seed = 0) : bytes(8 * kElementArrays) {
    std::mt19937_64 random(seed);
    for (uint8_t& byte : bytes) {
      byte = seed == 0 ? 0 : static_cast<uint8_t>(random());
    }
  }
  uint8_t* at(int array) { return bytes.data() + 8 * array; }
  uint64_t digest(const Layout& layout, const DigestPlace& place) {
    void* x[kArrays] = {};
    for (int array = kParam; array < kElementArrays; ++array) {
      x[array] = at(array);
    }
    return layout.param == DType::kFloat64 ? digest_element<double>(layout, x, 0, place)
                                           : digest_element<float>(layout, x, 0, place);
  }
  std::vector<uint8_t> bytes;
};

TEST(Digest, EveryFlippedBitShows) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  for (const DType type : kTypes) {
    for (const Master master :
         {Master::kNone, Master::kFloat32, Master::kRemainder, Master::kRemainder8}) {
      if (type == DType::kFloat64 && master != Master::kNone) {
        continue;
      }
      const Layout layout{type, type, type, master, true};
      for (const uint64_t element :
           {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{0xffffffff}, uint64_t{1} << 40}) {
        Element stored(1 + element);
        const DigestPlace place = digest_place(3, element);
        const uint64_t before = stored.digest(layout, place);
        for_each_stored(layout, [&](Array array) {
          for (int64_t bit = 0; bit < 8 * element_size(layout, array); ++bit) {
            const auto flipped = static_cast<uint8_t>(1u << bit % 8);
            stored.at(array)[bit / 8] ^= flipped;
            ASSERT_NE(stored.digest(layout, place), before) << array << " " << bit;
            stored.at(array)[bit / 8] ^= flipped;
          }
        });
      }
    }
  }
}

TEST(Digest, PlacesAndArraysAndParametersDiffer) {
  const Layout layout{.amsgrad = true};
  std::vector<uint64_t> seen;
  for (const uint32_t parameter : {0u, 1u, 1000u}) {
    for (uint64_t element = 0; element < 100; ++element) {
      for_each_stored(layout, [&](Array array) {
        Element one;
        one.at(array)[2] = 0x80;
        seen.push_back(one.digest(layout, digest_place(parameter, element)));
      });
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
}

// Distinct factors reveal exchanged halves. Pairs that add up to 2048 bound sums (digest_sums.h).
TEST(Digest, FactorsOfHalvesDifferAndAreOdd) {
  std::vector<int> factors;
  for (uint32_t half = 0; half < 2 * kDigestSegment; ++half) {
    factors.push_back(half_factor(half));
    EXPECT_EQ(factors.back() % 2, 1);
  }
  for (uint32_t word = 0; word < kDigestSegment; ++word) {
    EXPECT_EQ(factors[2 * word] + factors[2 * word + 1], 2048);
  }
  std::sort(factors.begin(), factors.end());
  EXPECT_EQ(std::unique(factors.begin(), factors.end()), factors.end());
}

TEST(Digest, FactorsOfLanesDifferAndAreOdd) {
  constexpr uint64_t kSegments = 1 << 13;
  std::vector<int32_t> factors;
  for (uint64_t segment = 0; segment < kSegments; ++segment) {
    for (uint32_t word = 0; word < kDigestLanes; ++word) {
      const uint64_t first = segment * kDigestSegment;
      factors.push_back(lane_factor(digest_place(0, first), word));
      EXPECT_EQ(factors.back() & 1, 1);
      EXPECT_EQ(factors.back(),
                lane_factor(digest_place(0, first + kDigestSegment - 1), word + kDigestLanes));
    }
  }
  std::sort(factors.begin(), factors.end());
  // The lowest bit is always 1: about 2**16 * 2**16 / 2**32 = 1 pair of factors becomes equal.
  EXPECT_GE(std::unique(factors.begin(), factors.end()) - factors.begin(), (1 << 16) - 8);
}

}  // namespace
}  // namespace torchopt_ext

// The digest notices any flipped bit, and does not depend on the order it is taken in.
#include "kernels/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support.h"

namespace torchopt_ext {
namespace {

template <class Bits>
std::vector<Bits> random_words(size_t n) {
  std::mt19937_64 random(9);
  std::vector<Bits> words(n);
  for (Bits& word : words) {
    word = static_cast<Bits>(random());
  }
  return words;
}

template <class Bits>
uint64_t digest_of(const std::vector<Bits>& words, uint32_t salt, uint64_t first) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    sum += digest_element(salt, first + i, words[i]);
  }
  return sum;
}

template <class Bits>
void every_flipped_bit_shows() {
  std::vector<Bits> words = random_words<Bits>(500);
  for (const uint64_t first : {uint64_t{0}, uint64_t{0xffffff00}, uint64_t{1} << 40}) {
    const uint32_t salt = digest_salt(3, kExpAvg);
    const uint64_t before = digest_of(words, salt, first);
    for (size_t i = 0; i < words.size(); ++i) {
      const Bits kept = words[i];
      const uint64_t of_kept = digest_element(salt, first + i, kept);
      for (unsigned bit = 0; bit < 8 * sizeof(Bits); ++bit) {
        words[i] = static_cast<Bits>(kept ^ static_cast<Bits>(Bits{1} << bit));
        ASSERT_NE(before - of_kept + digest_element(salt, first + i, words[i]), before)
            << i << " " << bit;
      }
      words[i] = kept;
    }
  }
}

TEST(Digest, EveryFlippedBitShows) {
  every_flipped_bit_shows<uint16_t>();
  every_flipped_bit_shows<uint32_t>();
  every_flipped_bit_shows<uint64_t>();
}

TEST(Digest, PlacesAndArraysAndParametersDiffer) {
  const uint32_t word = 0x3f800000u;
  std::vector<uint64_t> seen;
  for (const uint32_t parameter : {0u, 1u, 1000u}) {
    for (int array = kParam; array < kWritten; ++array) {
      for (uint64_t element = 0; element < 100; ++element) {
        seen.push_back(digest_element(digest_salt(parameter, array), element, word));
      }
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
}

template <class Bits>
void shards_add_up(int log2_size) {
  const std::vector<Bits> words = random_words<Bits>(1000);
  const uint32_t salt = digest_salt(1, kParam);
  for (const int64_t first : {int64_t{0}, (int64_t{1} << 32) - 500}) {
    const uint64_t whole = digest_of(words, salt, static_cast<uint64_t>(first));
    for (const KernelTable* table : runnable_tables()) {
      for (const int64_t cut : {0, 1, 333, 1000}) {
        const auto digest = table->digest[log2_size];
        const uint64_t end = digest(words.data() + cut, salt, first + cut, 1000 - cut);
        ASSERT_EQ(end + digest(words.data(), salt, first, cut), whole) << table->name;
      }
    }
  }
}

TEST(Digest, ShardsAddUpInAnyOrderOnEveryInstructionSet) {
  shards_add_up<uint16_t>(1);
  shards_add_up<uint32_t>(2);
  shards_add_up<uint64_t>(3);
}

}  // namespace
}  // namespace torchopt_ext

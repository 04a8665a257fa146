// Tests the index arithmetic of both back ends, exhaustively over small sizes.
#include "work/work_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "kernels/block_rule.h"

namespace torchopt_ext {
namespace {

TensorWork tensor_of(int64_t rows, int64_t row_length) {
  TensorWork work{};
  work.numel = rows * row_length;
  work.row_length = row_length;
  return work;
}

struct BlockRange {
  int64_t begin;
  int64_t length;
};

// Returns every block of a tensor by the block rule: rows cut every 4,096 elements.
std::vector<BlockRange> blocks_by_the_rule(int64_t rows, int64_t row_length) {
  std::vector<BlockRange> blocks;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < row_length; i += kBlockElements) {
      blocks.push_back({row * row_length + i, std::min(kBlockElements, row_length - i)});
    }
  }
  return blocks;
}

const int64_t kRowLengths[] = {1,    2,    63,   64,   65,   100,   4095,  4096,
                               4097, 5000, 8192, 8193, 9000, 32768, 32769, 70000};
const int64_t kRowCounts[] = {1, 2, 3, 7, 40};
const int64_t kChunkSizes[] = {1, 4096, 5000, 8192, 32768, 1 << 20};

TEST(ChunkTable, CoversEveryElementOnceInOrder) {
  for (const int64_t row_length : kRowLengths) {
    for (const int64_t rows : kRowCounts) {
      for (const int64_t size : kChunkSizes) {
        const std::vector<TensorWork> tensors{tensor_of(rows, row_length), tensor_of(0, 1),
                                              tensor_of(1, row_length)};
        const std::vector<Chunk> chunks = make_chunks(tensors, size);
        size_t c = 0;
        for (const int32_t t : {0, 2}) {
          int64_t next = 0;
          for (; c < chunks.size() && chunks[c].tensor == t; ++c) {
            ASSERT_EQ(chunks[c].begin, next);
            ASSERT_GT(chunks[c].end(), chunks[c].begin);
            next = chunks[c].end();
          }
          ASSERT_EQ(next, tensors[static_cast<size_t>(t)].numel);
        }
        ASSERT_EQ(c, chunks.size());  // the empty tensor has no chunk
      }
    }
  }
}

TEST(ChunkTable, BlocksOfChunksAreTheBlocksOfTheRule) {
  for (const int64_t row_length : kRowLengths) {
    if (row_length < kShortRow) {
      continue;  // summed by element: no blocks
    }
    for (const int64_t rows : kRowCounts) {
      const std::vector<BlockRange> expected = blocks_by_the_rule(rows, row_length);
      for (const int64_t size : kChunkSizes) {
        std::vector<BlockRange> found;
        for (const Chunk& chunk : make_chunks({tensor_of(rows, row_length)}, size)) {
          for (int64_t i = chunk.begin; i < chunk.end(); i += found.back().length) {
            const int64_t left = std::min(row_length - i % row_length, chunk.end() - i);
            found.push_back({i, std::min(kBlockElements, left)});
          }
        }
        ASSERT_EQ(found.size(), expected.size()) << rows << " x " << row_length << " by " << size;
        for (size_t i = 0; i < found.size(); ++i) {
          ASSERT_EQ(found[i].begin, expected[i].begin);
          ASSERT_EQ(found[i].length, expected[i].length);
        }
      }
    }
  }
}

TEST(ChunkTable, PlainChunksCoverEachElementOnce) {
  for (const int64_t numel : {0, 1, 1000, 8191, 8192, 8193, 33000}) {
    TensorWork quantized = tensor_of(3, 5000);  // its chunks do not cross rows
    quantized.kind = AdamKind::kInt8;
    const std::vector<TensorWork> tensors{tensor_of(1, numel), tensor_of(2, 4096), quantized,
                                          tensor_of(1, 7)};
    const std::array<int64_t, 4> most{4096, 2048, 4096, 0};
    size_t next_most = 0;
    std::vector<Chunk> chunks;
    add_plain_chunks(tensors, [&](const TensorWork&) { return most.at(next_most++); }, chunks);
    std::array<int64_t, 4> covered{};
    for (const Chunk& chunk : chunks) {
      const auto t = static_cast<size_t>(chunk.tensor);
      ASSERT_EQ(chunk.begin, covered.at(t));
      ASSERT_GT(chunk.end(), chunk.begin);
      ASSERT_LE(chunk.count, most.at(t));
      ASSERT_EQ(chunk.begin % (t == 2 ? 1 : most.at(t)), 0);
      ASSERT_TRUE(t != 2 || chunk.begin / 5000 == (chunk.end() - 1) / 5000);
      covered.at(t) = chunk.end();
    }
    ASSERT_EQ(covered, (std::array<int64_t, 4>{numel, 8192, 15000, 0}));
  }
}

TEST(ChunkTable, FirstChunksOfRangesOfTensors) {
  const std::vector<TensorWork> tensors{tensor_of(0, 1), tensor_of(1, 10), tensor_of(2, 5000),
                                        tensor_of(0, 1), tensor_of(0, 1),  tensor_of(1, 1)};
  const std::vector<Chunk> chunks = make_chunks(tensors, 4096);  // by tensor: 0, 1, 4, 0, 0, 1
  ASSERT_EQ(chunks.size(), 6U);
  using Firsts = std::vector<int64_t>;
  EXPECT_EQ(first_chunks(chunks, 6, 1), (Firsts{0, 0, 1, 5, 5, 5, 6}));
  EXPECT_EQ(first_chunks(chunks, 6, 2), (Firsts{0, 1, 5, 6}));
  EXPECT_EQ(first_chunks(chunks, 6, 4), (Firsts{0, 5, 6}));
  EXPECT_EQ(first_chunks(chunks, 6, 100), (Firsts{0, 6}));
  EXPECT_EQ(first_chunks({}, 2, 1), (Firsts{0, 0, 0}));
}

TEST(ChunkTable, SharesAreDisjointCompleteAndBalanced) {
  std::vector<TensorWork> tensors;
  tensors.reserve(50);
  for (int64_t i = 0; i < 50; ++i) {
    tensors.push_back(tensor_of(1 + i % 3, 1000 * i + 1));
  }
  const std::vector<Chunk> chunks = make_chunks(tensors);
  const std::vector<int64_t> cumulative = cumulative_bytes(tensors, chunks);
  for (int64_t shares = 1; shares <= 64; ++shares) {
    ASSERT_EQ(first_of_share(cumulative, 0, shares), 0U);
    for (int64_t share = 0; share < shares; ++share) {
      const size_t first = first_of_share(cumulative, share, shares);
      const size_t last = first_of_share(cumulative, share + 1, shares);
      ASSERT_GE(last, first);
      const int64_t bytes = cumulative[last] - cumulative[first];
      ASSERT_LE(bytes, cumulative.back() / shares + 2 * 4 * kChunkElements);
    }
    ASSERT_EQ(first_of_share(cumulative, shares, shares), chunks.size());
  }
}

TEST(ChunkTable, MoreThanTwoToThe31Elements) {
  const int64_t rows = (int64_t{1} << 31) / 4096 + 5;
  const std::vector<Chunk> chunks = make_chunks({tensor_of(rows, 4096)});
  EXPECT_EQ(chunks.back().end(), rows * 4096);
  EXPECT_EQ(cumulative_bytes({tensor_of(rows, 4096)}, chunks).back(), rows * 4096 * 4);
}

}  // namespace
}  // namespace torchopt_ext

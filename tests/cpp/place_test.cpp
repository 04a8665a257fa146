// A shard's place in its parameter decides its draws: with any sharding, a parameter gets the bits
// of the whole.
#include <gtest/gtest.h>

#include "step_support.h"

namespace torchopt_ext {
namespace {

constexpr int64_t kRows = 12;
constexpr int64_t kColumns = 90;
constexpr int64_t kElements = kRows * kColumns;

// The place of a shard: elements of the parameter, run by run.
struct Place {
  int64_t numel;
  int64_t first_element;
  int64_t run;
  int64_t stride;
  int64_t rows = 0;
  int64_t gap = 0;
};

// Groups of 8-bit moments lie within rows. For other moments rows do not matter.
Case case_of(const Layout& layout, int64_t numel) {
  Case c{.layout = layout,
         .options = {.stochastic_rounding = true, .track = 3, .rounding_seed = 5}};
  const bool is_quantized = layout.state == DType::kInt8;
  c.row_length = is_quantized ? kColumns : numel;
  c.rows = numel / c.row_length;
  return c;
}

int64_t element_of(const Place& place, int64_t i) {
  TensorWork work{};
  work.first_element = place.first_element;
  work.run = place.run;
  work.stride = place.stride;
  work.rows = place.rows;
  work.gap = place.gap;
  return global_element(work, i);
}

constexpr Array kOfElements[] = {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kGrad};

// Returns a shard with its elements of the whole and the scales of its rows.
Tensor shard_of(const Tensor& whole, const Place& place) {
  Tensor shard(case_of(whole.work.layout, place.numel));
  const auto copy = [&](Array array, int64_t to, int64_t from, int64_t count) {
    const auto size = static_cast<int64_t>(whole.size(array));
    std::memcpy(shard.memory(array).data() + to * size, whole.memory(array).data() + from * size,
                static_cast<size_t>(count * size));
  };
  for (const Array array : kOfElements) {
    for (int64_t i = 0; i < place.numel; ++i) {
      copy(array, i, element_of(place, i), 1);
    }
  }
  if (whole.work.layout.state == DType::kInt8) {
    const int64_t groups = groups_in_row(kColumns);
    for (int64_t row = 0; row < place.numel / kColumns; ++row) {
      const int64_t from = element_of(place, row * kColumns) / kColumns;
      copy(scale_array(0), row * groups, from * groups, groups);
      copy(scale_array(1), row * groups, from * groups, groups);
    }
  }
  shard.work.first_element = whole.work.first_element + place.first_element;
  shard.work.run = place.run;
  shard.work.stride = place.stride;
  shard.work.rows = place.rows;
  shard.work.gap = place.gap;
  return shard;
}

template <class Step>
void expect_shards_as_whole(const Tensor& start, const std::vector<Place>& places,
                            const Step& step) {
  Tensor whole = start;
  step(whole);
  for (const Place& place : places) {
    Tensor shard = shard_of(start, place);
    step(shard);
    const Tensor expected = shard_of(whole, place);
    for (int array = 0; array < kArrays; ++array) {
      ASSERT_EQ(shard.memory(static_cast<Array>(array)),
                expected.memory(static_cast<Array>(array)));
    }
  }
}

// Splits by rows, by flat intervals that meet at an odd element, by columns of odd or even width,
// and into boxes of 3 of 6 rows and some columns.
const std::vector<std::vector<Place>> kSplits{
    {{5 * kColumns, 0, 0, 0}, {7 * kColumns, 5 * kColumns, 0, 0}},
    {{33, 0, 0, 0}, {kElements - 33, 33, 0, 0}},
    {{kRows * 45, 0, 45, kColumns}, {kRows * 45, 45, 45, kColumns}},
    {{kRows * 32, 0, 32, kColumns}, {kRows * 58, 32, 58, kColumns}},
    {{6 * 33, 0, 33, kColumns, 3, 3 * kColumns},
     {6 * 57, 33, 57, kColumns, 3, 3 * kColumns},
     {6 * 33, 3 * kColumns, 33, kColumns, 3, 3 * kColumns},
     {6 * 57, 3 * kColumns + 33, 57, kColumns, 3, 3 * kColumns}}};
// Splits by whole rows: one interval each, and two of every four rows each.
const std::vector<std::vector<Place>> kRowSplits{
    kSplits[0],
    {{kElements / 2, 0, 2 * kColumns, 4 * kColumns},
     {kElements / 2, 2 * kColumns, 2 * kColumns, 4 * kColumns}}};

TEST(Place, ShardsGetTheBitsOfTheWhole) {
  std::vector<Layout> layouts{
      kTraits<AdamKind::kFloat32>.layout,           kTraits<AdamKind::kFloat64>.layout,
      kTraits<AdamKind::kBFloat16>.layout,          kTraits<AdamKind::kBFloat16Master>.layout,
      kTraits<AdamKind::kBFloat16Remainder>.layout, kTraits<AdamKind::kInt8Float32>.layout,
      kTraits<AdamKind::kInt8Remainder8>.layout};
  Layout layout = kTraits<AdamKind::kBFloat16>.layout;
  layout.states = 7;
  layouts.push_back(layout);
  layout.master = Master::kRemainder8;
  layouts.push_back(layout);
  for (const Layout& held : layouts) {
    // The start of a parameter, and an odd element before the end of a stream.
    for (const int64_t first : {int64_t{0}, kStreamElements - 517}) {
      Tensor whole(case_of(held, kElements));
      whole.work.first_element = first;
      for (const auto& split : held.state == DType::kInt8 ? kRowSplits : kSplits) {
        for (const KernelTable* table : runnable_tables()) {
          expect_shards_as_whole(whole, split, [&](Tensor& tensor) {
            step_on_cpu(*table, tensor, hyper_of(2), control_of_a_step());
          });
        }
        expect_shards_as_whole(whole, split, [&](Tensor& tensor) {
          step_as_cuda(tensor, hyper_of(2), control_of_a_step(), 64);
        });
      }
    }
  }
}

// A chunk of short rows has the most tiles, because rows end in short groups.
TEST(Place, AChunkOfShortRowsHasTilesForAllGroups) {
  Case c = case_of(kTraits<AdamKind::kInt8Float32>.layout, kColumns);
  c.row_length = kQuantGroup + 1;
  c.rows = 500;
  Tensor on_cpu(c);
  Tensor as_cuda = on_cpu;
  const Report expected = step_on_cpu(kernels(), on_cpu, hyper_of(2), control_of_a_step());
  const Report found = step_as_cuda(as_cuda, hyper_of(2), control_of_a_step(), 256);
  EXPECT_TRUE(as_cuda.same_bits(on_cpu));
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_EQ(found.lost, expected.lost);
}

}  // namespace
}  // namespace torchopt_ext

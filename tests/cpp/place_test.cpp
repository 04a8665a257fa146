// Where a shard lies in its parameter decides its draws and digests: sharded any way, a parameter
// gets the bits of the whole, and the shards' digests add up to the whole's.
#include <gtest/gtest.h>

#include "step_support.h"

namespace torchopt_ext {
namespace {

constexpr int64_t kRows = 12;
constexpr int64_t kColumns = 90;
constexpr int64_t kElements = kRows * kColumns;

// Elements of the parameter, run by run.
struct Place {
  int64_t numel;
  int64_t first_element;
  int64_t run;
  int64_t stride;
};

Case whole_case(Master master) {
  Case c{.layout = layout_of(AdamKind::kBFloat16)};
  c.layout.master = master;
  c.layout.amsgrad = true;
  c.options = {.stochastic_rounding = true, .track = 7, .rounding_seed = 5};
  c.row_length = kElements;
  return c;
}

int64_t element_of(const Place& place, int64_t i) {
  TensorWork work{};
  work.first_element = place.first_element;
  work.run = place.run;
  work.stride = place.stride;
  return global_element(work, i);
}

// The elements of the whole that a shard has.
Tensor shard_of(const Tensor& whole, const Place& place) {
  Case c = whole_case(whole.work.layout.master);
  c.row_length = place.numel;
  Tensor shard(c);
  for (const Array array : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kGrad}) {
    const auto size = static_cast<size_t>(whole.size(array));
    for (int64_t i = 0; i < place.numel; ++i) {
      std::memcpy(shard.memory(array).data() + static_cast<size_t>(i) * size,
                  whole.memory(array).data() + static_cast<size_t>(element_of(place, i)) * size,
                  size);
    }
  }
  shard.work.first_element = place.first_element;
  shard.work.run = place.run;
  shard.work.stride = place.stride;
  return shard;
}

template <class Step>
void expect_shards_as_whole(Master master, const std::vector<Place>& places, const Step& step) {
  Tensor whole(whole_case(master));
  const Tensor start = whole;
  const auto digest = static_cast<uint64_t>(step(whole).counts[1]);
  uint64_t sum = 0;
  for (const Place& place : places) {
    Tensor shard = shard_of(start, place);
    sum += static_cast<uint64_t>(step(shard).counts[1]);
    const Tensor expected = shard_of(whole, place);
    for (const Array array : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kGrad}) {
      const auto bytes = static_cast<size_t>(place.numel * whole.size(array));
      ASSERT_EQ(std::memcmp(shard.memory(array).data(), expected.memory(array).data(), bytes), 0);
    }
  }
  EXPECT_EQ(sum, digest);
}

TEST(Place, ShardsGetTheBitsOfTheWhole) {
  const std::vector<std::vector<Place>> splits{
      // Rows; a flat interval that starts at an odd element; columns, of odd and even width.
      {{5 * kColumns, 0, 0, 0}, {7 * kColumns, 5 * kColumns, 0, 0}},
      {{33, 0, 0, 0}, {kElements - 33, 33, 0, 0}},
      {{kRows * 45, 0, 45, kColumns}, {kRows * 45, 45, 45, kColumns}},
      {{kRows * 32, 0, 32, kColumns}, {kRows * 58, 32, 58, kColumns}}};
  for (const Master master : {Master::kNone, Master::kRemainder8}) {
    for (const auto& split : splits) {
      for (const KernelTable* table : runnable_tables()) {
        expect_shards_as_whole(master, split, [&](Tensor& tensor) {
          return step_on_cpu(*table, tensor, hyper_of(2), control_of_a_step());
        });
      }
      expect_shards_as_whole(master, split, [&](Tensor& tensor) {
        return step_as_cuda(tensor, hyper_of(2), control_of_a_step(), 64);
      });
    }
  }
}

}  // namespace
}  // namespace torchopt_ext

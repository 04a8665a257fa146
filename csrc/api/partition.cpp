#include <ATen/core/dispatch/Dispatcher.h>
#include <torchopt_ext/partition.h>

#include <tuple>

// By the operators, which check their arguments.
namespace torchopt_ext {

std::vector<int64_t> partition_greedy(const std::vector<int64_t>& numels, int64_t world_size) {
  using Signature = std::vector<int64_t>(at::IntArrayRef, int64_t, at::OptionalIntArrayRef,
                                         at::OptionalIntArrayRef);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchopt_ext::partition_greedy", "")
                             .typed<Signature>();
  return op.call(numels, world_size, std::nullopt, std::nullopt);
}

BalancedPartition partition_balanced(const std::vector<int64_t>& numels,
                                     const std::vector<int64_t>& row_lengths, int64_t world_size,
                                     std::optional<int64_t> bucket_elements, int64_t alignment) {
  using Lists = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>,
                           std::vector<int64_t>>;
  using Signature =
      Lists(at::IntArrayRef, at::IntArrayRef, int64_t, std::optional<int64_t>, int64_t);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchopt_ext::partition_balanced", "")
                             .typed<Signature>();
  auto [buckets, starts, lengths, cuts] =
      op.call(numels, row_lengths, world_size, bucket_elements, alignment);
  return {std::move(buckets), std::move(starts), std::move(lengths), std::move(cuts)};
}

}  // namespace torchopt_ext

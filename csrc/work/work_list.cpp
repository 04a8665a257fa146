#include "work/work_list.h"

#include <algorithm>

#include "kernels/block_rule.h"

namespace torchopt_ext {

void WorkList::split_into_chunks() {
  chunks = make_chunks(tensors, kChunkElements, ranges);
  cumulative = cumulative_bytes(tensors, chunks);
  device_tables.reset();
}

ElementRange range_of(const std::vector<TensorWork>& tensors,
                      const std::vector<ElementRange>& ranges, size_t t) {
  return ranges.empty() ? ElementRange{0, tensors[t].numel} : ranges[t];
}

namespace {

// Cuts a tensor's range into chunks of whole rows if they fit, otherwise of whole blocks of one
// row, or of multiples of kBlockElements if rows are shorter than kShortRow.
void cut_by_rows(const std::vector<TensorWork>& tensors, size_t t, ElementRange range,
                 int64_t chunk_elements, std::vector<Chunk>& chunks) {
  const int64_t row = tensors[t].row_length;
  const bool by_element = row < kShortRow;
  const bool whole_rows = !by_element && row <= chunk_elements;
  const int64_t length =
      whole_rows ? chunk_elements / row * row
                 : std::max<int64_t>(1, chunk_elements / kBlockElements) * kBlockElements;
  for (int64_t begin = range.begin; begin < range.end;) {
    const int64_t limit = by_element || whole_rows ? range.end : begin - begin % row + row;
    const int64_t end = std::min({begin + length, limit, range.end});
    chunks.push_back({static_cast<int32_t>(t), static_cast<int32_t>(end - begin), begin});
    begin = end;
  }
}

}  // namespace

std::vector<Chunk> make_chunks(const std::vector<TensorWork>& tensors, int64_t chunk_elements,
                               const std::vector<ElementRange>& ranges) {
  std::vector<Chunk> chunks;
  for (size_t t = 0; t < tensors.size(); ++t) {
    cut_by_rows(tensors, t, range_of(tensors, ranges, t), chunk_elements, chunks);
  }
  return chunks;
}

void add_plain_chunks(const std::vector<TensorWork>& tensors,
                      const std::function<int64_t(const TensorWork&)>& elements,
                      std::vector<Chunk>& chunks, const std::vector<ElementRange>& ranges) {
  for (size_t t = 0; t < tensors.size(); ++t) {
    const int64_t length = elements(tensors[t]);
    if (length == 0) {
      continue;
    }
    const ElementRange range = range_of(tensors, ranges, t);
    if (is_quantized(tensors[t].kind)) {
      cut_by_rows(tensors, t, range, length, chunks);
      continue;
    }
    for (int64_t begin = range.begin; begin < range.end; begin += length) {
      const int64_t count = std::min(length, range.end - begin);
      chunks.push_back({static_cast<int32_t>(t), static_cast<int32_t>(count), begin});
    }
  }
}

std::vector<int64_t> first_chunks(const std::vector<Chunk>& chunks, size_t tensors, size_t range) {
  std::vector<int64_t> first;
  for (size_t t = 0; t < tensors; t += range) {
    const auto chunk = std::partition_point(chunks.begin(), chunks.end(), [&](const Chunk& before) {
      return static_cast<size_t>(before.tensor) < t;
    });
    first.push_back(chunk - chunks.begin());
  }
  first.push_back(static_cast<int64_t>(chunks.size()));
  return first;
}

std::vector<int64_t> cumulative_bytes(const std::vector<TensorWork>& tensors,
                                      const std::vector<Chunk>& chunks) {
  std::vector<int64_t> cumulative(chunks.size() + 1, 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Layout& layout = tensors[static_cast<size_t>(chunks[i].tensor)].layout;
    cumulative[i + 1] = cumulative[i] + chunks[i].count * element_size(layout, kParam);
  }
  return cumulative;
}

size_t first_of_share(const std::vector<int64_t>& cumulative, int64_t share, int64_t shares) {
  const int64_t bytes = cumulative.back() * share / shares;
  return static_cast<size_t>(std::lower_bound(cumulative.begin(), cumulative.end(), bytes) -
                             cumulative.begin());
}

}  // namespace torchopt_ext

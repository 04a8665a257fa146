// Plain loops over the streams of a step's two passes show what memory allows.
//
// Every loop has the same signature. streams[s][t] is tensor t of stream s, in the order given
// at the loop. Each thread takes one equal, contiguous share of all elements.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

using Streams = void* const* const*;

namespace {

// Volatile, so the compiler cannot know that this is 0. The loops have to read, compute and write,
// and the tensors keep their values.
volatile uint16_t zero = 0;
std::atomic<uint64_t> sink{0};

// Calls body(tensor, first, last) for the parts of each thread's share.
template <typename Body>
void for_each_share(const int64_t* sizes, int64_t tensors, int threads, const Body& body) {
  int64_t total = 0;
  for (int64_t t = 0; t < tensors; ++t) total += sizes[t];
#pragma omp parallel num_threads(threads)
  {
    const int64_t first = total * omp_get_thread_num() / omp_get_num_threads();
    const int64_t last = total * (omp_get_thread_num() + 1) / omp_get_num_threads();
    int64_t start = 0;
    for (int64_t t = 0; t < tensors && start < last; start += sizes[t++]) {
      const int64_t from = std::max(first - start, int64_t{0});
      const int64_t to = std::min(last - start, sizes[t]);
      if (from < to) body(t, from, to);
    }
  }
}

// Integer sums vectorize without permission to reorder floating-point operations.
template <typename Word>
void read(Streams streams, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const Word* g = static_cast<Word*>(streams[0][t]);
    Word sum = 0;
    for (int64_t i = from; i < to; ++i) sum += g[i];
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
}

// Reads the gradients, and reads and writes the other streams.
template <typename Gradient, typename... Rewritten>
void rewrite(const Gradient* __restrict g, int64_t n, Gradient mask,
             Rewritten* __restrict... streams) {
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<Gradient>(g[i] & mask);
    ((streams[i] ^= static_cast<Rewritten>(bits)), ...);
  }
}

template <typename Gradient, typename... Rewritten>
void update(Streams streams, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const auto* g = static_cast<const Gradient*>(streams[0][t]) + from;
    const auto rewritten = [&]<size_t... I>(std::index_sequence<I...>) {
      rewrite(g, to - from, Gradient{zero}, static_cast<Rewritten*>(streams[1 + I][t]) + from...);
    };
    rewritten(std::index_sequence_for<Rewritten...>{});
  });
}

// As `rewrite`, and writes the master's upper half into the parameter.
void rewrite_master(const uint16_t* __restrict g, uint32_t* __restrict master,
                    uint32_t* __restrict m, uint32_t* __restrict v, uint16_t* __restrict p,
                    int64_t n, uint16_t mask) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = g[i] & mask;
    master[i] ^= bits;
    p[i] = static_cast<uint16_t>(master[i] >> 16);
    m[i] ^= bits;
    v[i] ^= bits;
  }
}

// Rewrites the moment, and writes the direction.
void rewrite_moment(const uint32_t* __restrict g, uint32_t* __restrict m, uint32_t* __restrict u,
                    int64_t n, uint32_t mask) {
  for (int64_t i = 0; i < n; ++i) {
    m[i] ^= g[i] & mask;
    u[i] = m[i];
  }
}

}  // namespace

extern "C" {

// Streams: g.
void read_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  read<uint32_t>(s, sizes, tensors, threads);
}

// Streams: g.
void read_bf16(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  read<uint16_t>(s, sizes, tensors, threads);
}

// Reads what a step must check before it may access a tensor's memory. Streams: each tensor's
// c10::TensorImpl and c10::StorageImpl, in turn for g, p, m, v and the step count.
void read_objects(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  constexpr int64_t kTensorWords = 24, kStorageWords = 8;  // the cache lines that hold the fields
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t, int64_t) {
    uint64_t sum = 0;
    for (int stream = 0; stream < 10; ++stream) {
      const auto* object = static_cast<const uint64_t*>(s[stream][t]);
      for (int64_t i = 0; i < (stream % 2 == 0 ? kTensorWords : kStorageWords); ++i) {
        sum += object[i];
      }
    }
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
}

// Streams: g, p, m, v.
void update_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint32_t, uint32_t, uint32_t, uint32_t>(s, sizes, tensors, threads);
}

// Streams: g, p, and one state.
void update_fp32_1(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint32_t, uint32_t, uint32_t>(s, sizes, tensors, threads);
}

// Streams: g, p.
void update_fp32_0(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint32_t, uint32_t>(s, sizes, tensors, threads);
}

// Streams: g, m, u; u is only written.
void direction_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const auto word = [&](int i) { return static_cast<uint32_t*>(s[i][t]) + from; };
    rewrite_moment(word(0), word(1), word(2), to - from, zero);
  });
}

// Streams: g, master, m, v, p; p is only written.
void update_bf16_master(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const auto half = [&](int i) { return static_cast<uint16_t*>(s[i][t]) + from; };
    const auto word = [&](int i) { return static_cast<uint32_t*>(s[i][t]) + from; };
    rewrite_master(half(0), word(1), word(2), word(3), half(4), to - from, zero);
  });
}

// Streams: g, p, remainder, m, v.
void update_bf16_remainder(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint16_t, uint16_t, uint16_t, uint32_t, uint32_t>(s, sizes, tensors, threads);
}

// Streams: g, p, m, v.
void update_bf16(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint16_t, uint16_t, uint16_t, uint16_t>(s, sizes, tensors, threads);
}

// Streams: g, p, 8-bit remainder, 8-bit m and v.
void update_bf16_int8(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  update<uint16_t, uint16_t, uint8_t, uint8_t, uint8_t>(s, sizes, tensors, threads);
}

}  // extern "C"

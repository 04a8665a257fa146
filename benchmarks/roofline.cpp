// Plain loops over the streams of a step's two passes show what memory allows. The last two loops
// also compute what a step cannot do without, in the plainest way: a norm and AdamW.
//
// Every loop has the same signature. streams[s][t] is tensor t of stream s, in the order given
// at the loop. Each thread takes one equal, contiguous share of all elements.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

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

template <typename T>
T* at(Streams streams, int stream, int64_t tensor, int64_t element) {
  return static_cast<T*>(streams[stream][tensor]) + element;
}

// Integer sums vectorize without permission to reorder floating-point operations.
template <typename Word>
void read(Streams streams, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const Word* g = at<Word>(streams, 0, t, from);
    Word sum = 0;
    for (int64_t i = 0; i < to - from; ++i) sum += g[i];
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
}

float widen(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

uint16_t narrow(float x) {  // to nearest even
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

void fp32(const float* __restrict g, float* __restrict p, float* __restrict m, float* __restrict v,
          int64_t n, float k) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = k * g[i];
    p[i] += x;
    m[i] += x;
    v[i] += x;
  }
}

// AdamW. All factors are k = 0, which keeps the values.
void adamw(const float* __restrict g, float* __restrict p, float* __restrict m, float* __restrict v,
           int64_t n, float k) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = (1.0F - k) * g[i];
    m[i] += k * (x - m[i]);
    v[i] += k * (x * x - v[i]);
    p[i] -= k * p[i] + k * (m[i] / (std::sqrt(v[i]) + 1e-8F));
  }
}

double sum_of_squares(const float* g, int64_t n) {
  constexpr int kLanes = 32;  // independent sums, which vectorize
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = g[i + lane];
      sums[lane] += x * x;
    }
  }
  double total = 0.0;
  for (; i < n; ++i) total += double{g[i]} * g[i];
  for (const double sum : sums) total += sum;
  return total;
}

void bf16_master(const uint16_t* __restrict g, float* __restrict master, float* __restrict m,
                 float* __restrict v, uint16_t* __restrict p, int64_t n, float k) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = k * widen(g[i]);
    const float w = master[i] + x;
    master[i] = w;
    p[i] = narrow(w);
    m[i] += x;
    v[i] += x;
  }
}

void bf16_remainder(const uint16_t* __restrict g, uint16_t* __restrict p, uint16_t* __restrict r,
                    float* __restrict m, float* __restrict v, int64_t n, uint16_t k) {
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<uint16_t>(g[i] & k);
    const float x = widen(bits);
    p[i] ^= bits;
    r[i] ^= bits;
    m[i] += x;
    v[i] += x;
  }
}

void bf16(const uint16_t* __restrict g, uint16_t* __restrict p, uint16_t* __restrict m,
          uint16_t* __restrict v, int64_t n, uint16_t k) {
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<uint16_t>(g[i] & k);
    p[i] ^= bits;
    m[i] ^= bits;
    v[i] ^= bits;
  }
}

void bf16_int8(const uint16_t* __restrict g, uint16_t* __restrict p, uint8_t* __restrict r,
               uint8_t* __restrict m, uint8_t* __restrict v, int64_t n, uint16_t k) {
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<uint16_t>(g[i] & k);
    const auto byte = static_cast<uint8_t>(bits);
    p[i] ^= bits;
    r[i] ^= byte;
    m[i] ^= byte;
    v[i] ^= byte;
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
      const uint64_t* object = at<uint64_t>(s, stream, t, 0);
      for (int64_t i = 0; i < (stream % 2 == 0 ? kTensorWords : kStorageWords); ++i) {
        sum += object[i];
      }
    }
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
}

// Streams: g, p, m, v.
void update_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    fp32(at<float>(s, 0, t, from), at<float>(s, 1, t, from), at<float>(s, 2, t, from),
         at<float>(s, 3, t, from), to - from, zero);
  });
}

// Streams: g, master, m, v, p; p is only written.
void update_bf16_master(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    bf16_master(at<uint16_t>(s, 0, t, from), at<float>(s, 1, t, from), at<float>(s, 2, t, from),
                at<float>(s, 3, t, from), at<uint16_t>(s, 4, t, from), to - from, zero);
  });
}

// Streams: g, p, remainder, m, v.
void update_bf16_remainder(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    bf16_remainder(at<uint16_t>(s, 0, t, from), at<uint16_t>(s, 1, t, from),
                   at<uint16_t>(s, 2, t, from), at<float>(s, 3, t, from), at<float>(s, 4, t, from),
                   to - from, zero);
  });
}

// Streams: g, p, m, v.
void update_bf16(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    bf16(at<uint16_t>(s, 0, t, from), at<uint16_t>(s, 1, t, from), at<uint16_t>(s, 2, t, from),
         at<uint16_t>(s, 3, t, from), to - from, zero);
  });
}

// Streams: g, p, 8-bit remainder, 8-bit m and v.
void update_bf16_int8(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    bf16_int8(at<uint16_t>(s, 0, t, from), at<uint16_t>(s, 1, t, from), at<uint8_t>(s, 2, t, from),
              at<uint8_t>(s, 3, t, from), at<uint8_t>(s, 4, t, from), to - from, zero);
  });
}

// Streams: g.
void norm_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    const double sum = sum_of_squares(at<float>(s, 0, t, from), to - from);
    sink.fetch_add(std::bit_cast<uint64_t>(sum), std::memory_order_relaxed);
  });
}

// Streams: g, p, m, v.
void adamw_fp32(Streams s, const int64_t* sizes, int64_t tensors, int threads) {
  for_each_share(sizes, tensors, threads, [&](int64_t t, int64_t from, int64_t to) {
    adamw(at<float>(s, 0, t, from), at<float>(s, 1, t, from), at<float>(s, 2, t, from),
          at<float>(s, 3, t, from), to - from, zero);
  });
}

}  // extern "C"

// Pass A as a CUDA kernel's body, a template over the block of threads (cta.h). Free of torch.
// Block rule and lanes are the CPU's (cpu/sum_of_squares.h); what differs is who computes which
// element.
#pragma once

#include "cuda/array.h"
#include "cuda/cta.h"
#include "kernels/bins.h"
#include "kernels/block_rule.h"

namespace torchopt_ext {

// Tables in device memory.
struct SumOfSquaresArgs {
  const TensorWork* tensors;
  const Chunk* chunks;
  int64_t chunk_count;
  int64_t* accumulator;  // of an ExactAccumulator
};

namespace {

// A warp's sum over one block: thread t owns lanes 2t and 2t + 1, and accesses both at once where
// they are aligned: 8 bytes a thread of fp32 are 256 of a warp, whole memory sectors. Loads of 16
// bytes would need shuffles to give the lanes their order, and are not faster as long as enough
// loads are under way, for which there are kAhead.
template <class T, class Warp>
TORCHOPT_HD inline double warp_sum_of_squares(const Warp& warp, const DeviceArray& grad,
                                              DType dtype, const BlockRange& range) {
  using L = ScalarLane<double>;
  constexpr int64_t kAhead = 8;
  DeviceArray pairs = grad;
  pairs.aligned = is_aligned(address_of(grad, range.begin), 2 * grad.size);
  typename Warp::template PerThread<double> even;
  typename Warp::template PerThread<double> odd;
  warp.each([&](int thread) {
    double a = 0.0;
    double b = 0.0;
    const auto add_pair = [&](const Bits<T, 2>& bits) {
      T x[2];
      decode(bits, dtype, x);
      a = L::add(a, square(x[0]));
      b = L::add(b, square(x[1]));
    };
    int64_t i = 2 * thread;
    for (; i + (kAhead - 1) * kBlockLanes + 1 < range.length; i += kAhead * kBlockLanes) {
      Bits<T, 2> bits[kAhead];
      for (int64_t k = 0; k < kAhead; ++k) {
        bits[k] = load<T, 2>(pairs, range.begin + i + k * kBlockLanes);
      }
      for (const Bits<T, 2>& pair : bits) {
        add_pair(pair);
      }
    }
    for (; i + 1 < range.length; i += kBlockLanes) {
      add_pair(load<T, 2>(pairs, range.begin + i));
    }
    if (i < range.length) {
      T x[1];
      decode(load<T, 1>(grad, range.begin + i), dtype, x);
      a = L::add(a, square(x[0]));
    }
    even[thread] = a;
    odd[thread] = b;
  });
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    warp.fold(even, distance);
    warp.fold(odd, distance);
  }
  return L::add(even[0], odd[0]);
}

// Elements of short rows that a warp sums at a time.
inline constexpr int kShortPiece = 512;

// Adds the square of each element by itself.
template <class T, class Warp, class Add>
TORCHOPT_HD inline void warp_add_each(const Warp& warp, const DeviceArray& grad, DType dtype,
                                      int64_t begin, int64_t n, const Add& add) {
  warp.each([&](int thread) {
    for (int64_t i = thread; i < n; i += kWarpThreads) {
      T x[1];
      decode(load<T, 1>(grad, begin + i), dtype, x);
      add(square(x[0]));
    }
  });
}

// Adds the exact square of each of at most kShortPiece elements that are not fp64, in bins below
// the warp's largest square, as the CPU does.
template <class Warp, class Add>
TORCHOPT_HD inline void warp_add_squares(const Warp& warp, const DeviceArray& grad, DType dtype,
                                         int64_t begin, int64_t n, const Add& add) {
  using L = ScalarLane<double>;
  constexpr int kEach = kShortPiece / kWarpThreads;
  constexpr int kBins = 3;
  struct Elements {
    float x[kEach];
  };
  typename Warp::template PerThread<Elements> elements;
  typename Warp::template PerThread<uint32_t> largest;
  warp.each([&](int thread) {
    Bits<float, 1> bits[kEach];
    for (int k = 0; k < kEach; ++k) {  // all loads first
      const int64_t i = thread + k * kWarpThreads;
      bits[k] = i < n ? load<float, 1>(grad, begin + i) : Bits<float, 1>{};
    }
    uint32_t most = 0;
    for (int k = 0; k < kEach; ++k) {
      float x[1];
      decode(bits[k], dtype, x);
      elements[thread].x[k] = x[0];
      const uint32_t magnitude = bit_cast<uint32_t>(x[0]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    largest[thread] = most;
  });
  const uint32_t most = Warp::max(largest);
  if (most == 0) {
    return;
  }
  const bool finite = most < 0x7f800000u;
  const int exponent = exponent_of(square(bit_cast<float>(most)));
  typename Warp::template PerThread<double> first;
  typename Warp::template PerThread<double> second;
  typename Warp::template PerThread<double> third;
  typename Warp::template PerThread<uint32_t> is_left;
  warp.each([&](int thread) {
    const double bias[kBins] = {bin_bias(exponent, 0), bin_bias(exponent, 1),
                                bin_bias(exponent, 2)};
    double sum[kBins] = {bias[0], bias[1], bias[2]};
    bool left = !finite;
    for (int k = 0; k < kEach; ++k) {
      double rest = square(elements[thread].x[k]);
      for (double& bin : sum) {
        const double before = bin;
        bin = L::add(before, rest);
        rest = L::sub(rest, L::sub(bin, before));
      }
      left = left || rest != 0.0;
    }
    first[thread] = L::sub(sum[0], bias[0]);
    second[thread] = L::sub(sum[1], bias[1]);
    third[thread] = L::sub(sum[2], bias[2]);
    is_left[thread] = left ? 1 : 0;
  });
  if (Warp::max(is_left) != 0) {  // bits below the last bin, infinities, NaNs
    warp_add_each<float>(warp, grad, dtype, begin, n, add);
    return;
  }
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    warp.fold(first, distance);  // exact, as every thread's sum is
    warp.fold(second, distance);
    warp.fold(third, distance);
  }
  warp.leader([&] {
    add(first[0]);
    add(second[0]);
    add(third[0]);
  });
}

// A warp's share of a chunk; `warp_index` of `warps`.
template <class Warp, class Add>
TORCHOPT_HD inline void warp_add_chunk(const Warp& warp, int warp_index, int warps,
                                       const TensorWork& work, const Chunk& chunk, const Add& add) {
  const DType dtype = work.layout.grad;
  const DeviceArray grad = array_of(work.memory[kGrad], element_size(dtype));
  if (work.row_length >= kShortRow) {
    const int64_t blocks = block_count(work.row_length, chunk.begin, chunk.end);
    for (int64_t b = warp_index; b < blocks; b += warps) {
      const BlockRange range = block_range(work.row_length, chunk.begin, chunk.end, b);
      const double sum = dtype == DType::kFloat64
                             ? warp_sum_of_squares<double>(warp, grad, dtype, range)
                             : warp_sum_of_squares<float>(warp, grad, dtype, range);
      warp.leader([&] { add(sum); });
    }
    return;
  }
  for (int64_t i = chunk.begin + warp_index * kShortPiece; i < chunk.end;
       i += warps * kShortPiece) {
    const int64_t n = chunk.end - i < kShortPiece ? chunk.end - i : kShortPiece;
    if (dtype == DType::kFloat64) {
      warp_add_each<double>(warp, grad, dtype, i, n, add);
    } else {
      warp_add_squares(warp, grad, dtype, i, n, add);
    }
  }
}

// A block of threads sums chunks into shared memory and then into the accumulator, by integer
// atomics, whose order does not show. It adds to a limb at most once for every element, and no
// block has the 2**30 elements that would ask for carries in between.
template <class Cta>
TORCHOPT_HD inline void sum_of_squares_body(Cta& cta, const SumOfSquaresArgs& args) {
  ExactAccumulator& shared = cta.shared().accumulator;
  auto* slots = reinterpret_cast<int64_t*>(&shared);
  const auto add = [&](double x) {
    accumulator_digits(x, [&](int index, int64_t change) { Cta::add(slots + index, change); });
  };
  cta.each([&](int thread) {
    for (int k = thread; k < ExactAccumulator::kSize; k += cta.threads) {
      slots[k] = 0;
    }
  });
  cta.each_warp([&](int warp_index, const auto& warp) {
    for (int64_t c = cta.block; c < args.chunk_count; c += cta.blocks) {
      const Chunk chunk = args.chunks[c];
      const TensorWork& work = args.tensors[chunk.tensor];
      if (work.memory[kGrad] != nullptr) {
        warp_add_chunk(warp, warp_index, cta.threads / kWarpThreads, work, chunk, add);
      }
    }
  });
  cta.each([&](int thread) {
    if (thread == 0) {
      accumulator_normalize(shared);
    }
  });
  cta.each([&](int thread) {
    for (int k = thread; k < ExactAccumulator::kSize; k += cta.threads) {
      if (slots[k] != 0) {
        Cta::add(args.accumulator + k, slots[k]);
      }
    }
  });
}

}  // namespace
}  // namespace torchopt_ext

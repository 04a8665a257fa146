// Pass A as a CUDA kernel. Block rule and lanes are the CPU's (cpu/block_sums.h); only the
// assignment of elements to threads differs.
#pragma once

#include "cuda/accumulator.h"
#include "cuda/gradients.h"
#include "cuda/launch.h"
#include "cuda/vector.h"
#include "kernels/bins.h"
#include "kernels/block_rule.h"
#include "work/work_list.h"

namespace torchopt_ext {
namespace {

TORCHOPT_HD inline double square_of(uint64_t bits, DType) { return square(bit_cast<double>(bits)); }
TORCHOPT_HD inline double square_of(uint32_t bits, DType) { return square(bit_cast<float>(bits)); }
TORCHOPT_HD inline double square_of(uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? square(BFloat16{bits}) : square(Float16{bits});
}
template <int kSize>
TORCHOPT_HD inline double square_at(const char* memory, int i, DType dtype) {
  return square_of(load_bits<Bits<kSize>>(memory + i * kSize), dtype);
}

// Returns a warp's sum over one block. With vectors of 16 bytes the warp reads one, two or four
// rows of the rule's 64 lanes at once, and a thread 2, 4 or 8 lanes of one row. Exchanges between
// threads give each thread two lanes of every row, whose elements it adds in order.
template <int kSize, class Warp>
TORCHOPT_HD inline double block_sum(const Warp& warp, const char* memory, DType dtype, int n) {
  using L = ScalarLane<double>;
  constexpr int kElements = 16 / kSize;                 // of a vector
  constexpr int kRows = kElements / 2;                  // read by a warp at once
  constexpr int kRowThreads = kBlockLanes / kElements;  // threads that read one row
  constexpr int kRowsElements = kRows * kBlockLanes;
  constexpr int kLoadsInFlight = 4;
  const auto first_lane = [](int thread) {
    return kElements * (thread % kRowThreads) + 2 * (thread / kRowThreads);
  };
  typename Warp::template PerThread<double> even{};
  typename Warp::template PerThread<double> odd{};
  const auto add_rows = [&](int i, auto loads, auto aligned) {
    typename Warp::template PerThread<uint32_t> word[loads][4];
    warp.each([&](int thread) {
      for (int k = 0; k < loads; ++k) {
        const char* rows = memory + (i + k * kRowsElements) * kSize;
        Vector vector{};
        if (aligned) {
          vector = load_bits<Vector>(rows + 16 * thread);
        } else {
          for (int e = 0; e < kElements; ++e) {
            const int at = e / 2 * kBlockLanes + first_lane(thread) + e % 2;
            set_element<kSize>(vector, e, load_bits<Bits<kSize>>(rows + at * kSize));
          }
        }
        for (int w = 0; w < 4; ++w) {
          word[k][w][thread] = vector.word[w];
        }
      }
    });
    for (int k = 0; aligned && k < loads; ++k) {
      if constexpr (kRows >= 2) {
        warp.exchange(word[k][0], word[k][2], 16);
        warp.exchange(word[k][1], word[k][3], 16);
      }
      if constexpr (kRows == 4) {
        warp.exchange(word[k][0], word[k][1], 8);
        warp.exchange(word[k][2], word[k][3], 8);
      }
    }
    warp.each([&](int thread) {
      double a = even[thread];
      double b = odd[thread];
      for (int k = 0; k < loads; ++k) {
        Vector vector;
        for (int w = 0; w < 4; ++w) {
          vector.word[w] = word[k][w][thread];
        }
        for (int r = 0; r < kRows; ++r) {
          a = L::add(a, square_of(element_of<kSize>(vector, 2 * r), dtype));
          b = L::add(b, square_of(element_of<kSize>(vector, 2 * r + 1), dtype));
        }
      }
      even[thread] = a;
      odd[thread] = b;
    });
  };
  const auto add_whole_rows = [&](auto aligned) {
    int i = 0;
    for (; i + kLoadsInFlight * kRowsElements <= n; i += kLoadsInFlight * kRowsElements) {
      add_rows(i, Constant<kLoadsInFlight>{}, aligned);
    }
    for (; i + kRowsElements <= n; i += kRowsElements) {
      add_rows(i, Constant<1>{}, aligned);
    }
    return i;
  };
  int i =
      is_aligned(memory, 16) ? add_whole_rows(Constant<true>{}) : add_whole_rows(Constant<false>{});
  for (; i < n; i += kBlockLanes) {
    warp.each([&](int thread) {
      const int at = i + first_lane(thread);
      if (at < n) {
        even[thread] = L::add(even[thread], square_at<kSize>(memory, at, dtype));
      }
      if (at + 1 < n) {
        odd[thread] = L::add(odd[thread], square_at<kSize>(memory, at + 1, dtype));
      }
    });
  }
  // Folds lanes 32 to kElements apart, then the others to 2 apart. A thread holds lanes 1 apart.
  const auto fold = [&](int distance) {
    warp.fold(even, distance);
    warp.fold(odd, distance);
  };
  for (int distance = kRowThreads / 2; distance > 0; distance /= 2) {
    fold(distance);
  }
  for (int distance = kWarpThreads / 2; distance >= kRowThreads; distance /= 2) {
    fold(distance);
  }
  return L::add(even[0], odd[0]);
}

// Adds the exact squares of the elements of short rows. A warp sums kShortPiece squares at a time
// in two bins (kernels/bins.h) from the largest square down. The remainders below the last bin go
// to two bins from the largest remainder down, and so on.
template <int kSize, class Warp>
TORCHOPT_HD inline void add_squares(const Warp& warp, const char* memory, DType dtype, int n,
                                    ExactAccumulator& acc) {
  using L = ScalarLane<double>;
  constexpr int kPerThread = 8;  // elements of a thread
  constexpr int kElements = 16 / kSize;
  constexpr int kShortPiece = kPerThread * kWarpThreads;
  struct Squares {
    double value[kPerThread];
  };
  typename Warp::template PerThread<Squares> remainders;
  typename Warp::template PerThread<uint32_t> largest;
  typename Warp::template PerThread<double> first;
  typename Warp::template PerThread<double> second;
  // Returns the upper half of the bits of the largest remainder; 0 only if all remainders are zero.
  const auto largest_remainder = [&] {
    warp.each([&](int thread) {
      uint32_t most = 0;
      unrolled<kPerThread>([&](int k) {
        const auto bits = bit_cast<uint64_t>(remainders[thread].value[k]);
        const uint32_t high = (static_cast<uint32_t>(bits >> 32) & 0x7fffffffu) |
                              (static_cast<uint32_t>(bits) != 0 ? 1u : 0u);
        most = high > most ? high : most;
      });
      largest[thread] = most;
    });
    return warp_max<Warp>(largest);
  };
  for (int begin = 0; begin < n; begin += kShortPiece) {
    const char* const piece = memory + begin * kSize;
    const bool whole = n - begin >= kShortPiece && is_aligned(piece, 16);
    warp.each([&](int thread) {
      double(&x)[kPerThread] = remainders[thread].value;
      if (whole) {
        Vector vector[kPerThread / kElements];
        unrolled<kPerThread / kElements>([&](int v) {
          vector[v] = load_bits<Vector>(piece + 16 * (v * kWarpThreads + thread));
        });
        unrolled<kPerThread>([&](int k) {
          x[k] = square_of(element_of<kSize>(vector[k / kElements], k % kElements), dtype);
        });
      } else {
        unrolled<kPerThread>([&](int k) {
          const int i = begin + k * kWarpThreads + thread;
          x[k] = i < n ? square_at<kSize>(memory, i, dtype) : 0.0;
        });
      }
    });
    for (uint32_t most = largest_remainder(); most != 0; most = largest_remainder()) {
      const auto biased = static_cast<int>(most >> 20);
      // Infinities, NaNs, and fp64 squares for which bins have no exponents.
      if (biased == 0x7ff || (kSize == 8 && (biased < 200 || biased > 2000))) {
        for (int turn = 0; turn < kPerThread; ++turn) {
          warp.in_turn([&](int thread) { accumulator_add(acc, remainders[thread].value[0]); });
          warp.each([&](int thread) {
            unrolled<kPerThread - 1>(
                [&](int k) { remainders[thread].value[k] = remainders[thread].value[k + 1]; });
          });
        }
        break;
      }
      const int exponent = biased - 1023;
      warp.each([&](int thread) {
        const double bias[2] = {bin_bias(exponent, 0), bin_bias(exponent, 1)};
        double bin[2] = {bias[0], bias[1]};
        unrolled<kPerThread>([&](int k) {
          double& rest = remainders[thread].value[k];
          unrolled<2>([&](int b) {
            const double before = bin[b];
            bin[b] = L::add(before, rest);
            rest = L::sub(rest, L::sub(bin[b], before));
          });
        });
        first[thread] = L::sub(bin[0], bias[0]);
        second[thread] = L::sub(bin[1], bias[1]);
      });
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        warp.fold(first, distance);  // exact, like each thread's sum
        warp.fold(second, distance);
      }
      warp.leader([&] {
        accumulator_add(acc, first[0]);
        accumulator_add(acc, second[0]);
      });
    }
  }
}

// Adds the squares of a warp's chunk: whole rows of at most kBlockElements, one block of a longer
// row, or elements of short rows.
template <int kSize, class Warp>
TORCHOPT_HD inline void add_chunk(const Warp& warp, const TensorWork& work, const void* grad,
                                  const Chunk& chunk, ExactAccumulator& acc) {
  const auto* const bytes = static_cast<const char*>(grad);
  if (work.row_length < kShortRow) {
    add_squares<kSize>(warp, bytes + chunk.begin * kSize, work.layout.grad, chunk.count, acc);
    return;
  }
  for (int64_t i = chunk.begin; i < chunk.end(); i += work.row_length) {
    const int64_t n = work.row_length < chunk.end() - i ? work.row_length : chunk.end() - i;
    const double sum =
        block_sum<kSize>(warp, bytes + i * kSize, work.layout.grad, static_cast<int>(n));
    warp.leader([&] { accumulator_add(acc, sum); });
  }
}

}  // namespace

// Pass A. A block of threads sums chunks in shared memory, each warp in an accumulator of its own,
// then adds the sum to the accumulator by integer atomics, whose order does not matter. A warp adds
// at most two numbers for each element. A block adds up eight warps. It would need carries in
// between from 2**27 elements per warp on, more than any GPU's memory has. Three blocks have 48 KB
// of loads in flight, twice what keeps memory busy.
template <int kTensors>
struct NormKernel : KernelOf<256, 3> {
  static constexpr int kWarps = 256 / kWarpThreads;
  using Shared = ExactAccumulator[kWarps];

  GradientPointers<kTensors> gradients;
  // Tables in device memory.
  const TensorWork* tensors;
  const Chunk* chunks;  // of at most kBlockElements; a warp takes one chunk at a time
  int64_t chunk_count;
  int64_t* accumulator;  // the slots of an ExactAccumulator

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta, Shared& shared) const {
    cta.each_warp([&](int warp_index, const auto& warp) {
      ExactAccumulator& acc = shared[warp_index];
      WarpSlots<std::decay_t<decltype(warp)>> zeros{};
      each_slot(warp, zeros, [&](int k, int64_t zero) { acc.limb[k] = zero; });
      for (int64_t c = cta.block * kWarps + warp_index; c < chunk_count; c += cta.blocks * kWarps) {
        const Chunk chunk = chunks[c];
        const TensorWork& work = tensors[chunk.tensor];
        const void* const grad = gradients.memory[int64_t{chunk.tensor} - gradients.first];
        if (grad == nullptr) {
          continue;
        }
        switch (element_size(work.layout.grad)) {
          case 2:
            add_chunk<2>(warp, work, grad, chunk, acc);
            break;
          case 4:
            add_chunk<4>(warp, work, grad, chunk, acc);
            break;
          default:
            add_chunk<8>(warp, work, grad, chunk, acc);
        }
      }
    });
    cta.each_warp([&](int warp_index, const auto& warp) {
      if (warp_index != 0) {
        return;
      }
      WarpSlots<std::decay_t<decltype(warp)>> slots;
      each_slot(warp, slots, [&](int k, int64_t& slot) {
        slot = 0;
        for (const ExactAccumulator& acc : shared) {
          slot += acc.limb[k];
        }
      });
      warp_normalize(warp, slots);
      each_slot(warp, slots, [&](int k, int64_t slot) {
        if (slot != 0) {
          Cta::add(accumulator + k, slot);
        }
      });
    });
  }
};

}  // namespace torchopt_ext

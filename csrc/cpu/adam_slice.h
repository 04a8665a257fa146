// Pass B on a chunk of one tensor: one call of a kernel where the update is all there is to do.
// Otherwise tile by tile, so that what else a step does finds the values in the first-level cache.
#pragma once

#include "cpu/kernel_table.h"
#include "kernels/digest.h"
#include "kernels/trace.h"
#include "work/work_list.h"

namespace torchopt_ext {

template <class T>
inline constexpr DType dtype_for = DType::kFloat32;
template <>
inline constexpr DType dtype_for<double> = DType::kFloat64;

template <class Void>
Void* element(Void* memory, int64_t size, int64_t i) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return memory == nullptr ? nullptr : static_cast<Byte*>(memory) + i * size;
}

// Calls visit(i, its global element, length) for the runs of elements [begin, begin + n) of a
// tensor that follow one another in the whole parameter.
template <class Visit>
void for_each_run(const TensorWork& work, int64_t begin, int64_t n, const Visit& visit) {
  for (int64_t i = begin; i < begin + n;) {
    const int64_t left = begin + n - i;
    const int64_t run = work.run == 0 ? left : work.run - i % work.run;
    const int64_t length = run < left ? run : left;
    visit(i, global_element(work, i), length);
    i += length;
  }
}

// Random bits of elements [begin, begin + n) of a tensor.
inline void tile_random_bits(const KernelTable& table, const RoundingKey& key,
                             const TensorWork& work, int64_t begin, int64_t n, uint64_t* to) {
  for_each_run(work, begin, n, [&](int64_t i, int64_t global, int64_t length) {
    table.random_bits(key, global, to + (i - begin), length);
  });
}

// Digest of elements [begin, begin + n) of one of a tensor's arrays.
inline uint64_t tile_digest(const KernelTable& table, const TensorWork& work, Role role,
                            const void* memory, int64_t size, int64_t begin, int64_t n) {
  if (memory == nullptr) {
    return 0;
  }
  const int log2_size = size == 8 ? 3 : size == 4 ? 2 : 1;
  uint64_t sum = 0;
  for_each_run(work, begin, n, [&](int64_t i, int64_t global, int64_t length) {
    sum += table.digest[log2_size](element(memory, size, i), digest_salt(work.index, role), global,
                                   length);
  });
  return sum;
}

// All that a step stores of elements [begin, begin + n) of a tensor.
inline uint64_t digest_of(const KernelTable& table, const TensorWork& work, int64_t begin,
                          int64_t n) {
  const int64_t param = element_size(work.param_dtype);
  const int64_t state = element_size(work.state_dtype);
  const int64_t master = master_size(work.weights);
  return tile_digest(table, work, kRoleParam, work.param, param, begin, n) +
         tile_digest(table, work, kRoleExpAvg, work.exp_avg, state, begin, n) +
         tile_digest(table, work, kRoleExpAvgSq, work.exp_avg_sq, state, begin, n) +
         tile_digest(table, work, kRoleMaxExpAvgSq, work.max_exp_avg_sq, state, begin, n) +
         tile_digest(table, work, kRoleMaster, work.master, master, begin, n);
}

// A tensor's arrays from element `begin` on.
inline AdamStreams streams_of(const TensorWork& work, int64_t begin) {
  const int64_t state = element_size(work.state_dtype);
  return {.param = element(work.param, element_size(work.param_dtype), begin),
          .grad = element(work.grad, element_size(work.grad_dtype), begin),
          .exp_avg = element(work.exp_avg, state, begin),
          .exp_avg_sq = element(work.exp_avg_sq, state, begin),
          .max_exp_avg_sq = element(work.max_exp_avg_sq, state, begin),
          .master = element(work.master, master_size(work.weights), begin),
          .random = nullptr,
          .param_dtype = work.param_dtype,
          .grad_dtype = work.grad_dtype,
          .state_dtype = work.state_dtype,
          .weights = work.weights};
}

template <class T>
class AdamSlice {
 public:
  // `past_caches`: the parameters beside masters are stored past the caches (adam_streams.h).
  AdamSlice(const KernelTable& table, const StepOptions& options, const AdamScalars<T>& scalars,
            const TensorWork& work, bool past_caches = false)
      : table_(table),
        options_(options),
        scalars_(scalars),
        work_(work),
        past_caches_(past_caches),
        rounds_randomly_(rounds_randomly(options, work)) {}

  // Elements [begin, end). `trace` is null if it is not wanted.
  void run(int64_t begin, int64_t end, ChunkTrace* trace) {
    if (trace == nullptr && !rounds_randomly_ && !options_.write_back_gradients) {
      AdamStreams x = streams_of(work_, begin);
      x.param_past_caches = past_caches_;
      update(x, end - begin);
      return;
    }
    if (trace != nullptr) {
      *trace = {};
    }
    for (int64_t i = begin; i < end; i += kTileElements) {
      tile(i, end - i < kTileElements ? end - i : kTileElements, trace);
    }
  }

 private:
  void update(const AdamStreams& x, int64_t n) const {
    if constexpr (sizeof(T) == sizeof(double)) {
      table_.adam_double(scalars_, static_cast<double*>(x.param),
                         static_cast<const double*>(x.grad), static_cast<double*>(x.exp_avg),
                         static_cast<double*>(x.exp_avg_sq), static_cast<double*>(x.max_exp_avg_sq),
                         n);
    } else if (x.random == nullptr && x.weights == Weights::kPlain &&
               x.param_dtype == DType::kFloat32 && x.grad_dtype == DType::kFloat32 &&
               x.state_dtype == DType::kFloat32) {
      table_.adam_float(scalars_, static_cast<float*>(x.param), static_cast<const float*>(x.grad),
                        static_cast<float*>(x.exp_avg), static_cast<float*>(x.exp_avg_sq),
                        static_cast<float*>(x.max_exp_avg_sq), n);
    } else {
      table_.adam_streams(scalars_, x, n);
    }
  }

  // The same for a tile, with what was added to each weight. Returns how many updates were lost.
  int64_t traced_update(const AdamStreams& x, T* change, int64_t n) const {
    if constexpr (sizeof(T) == sizeof(double)) {
      return table_.adam_traced_double(
          scalars_, static_cast<double*>(x.param), static_cast<const double*>(x.grad),
          static_cast<double*>(x.exp_avg), static_cast<double*>(x.exp_avg_sq),
          static_cast<double*>(x.max_exp_avg_sq), change, n);
    } else {
      return table_.adam_traced_float(scalars_, x, change, n);
    }
  }

  void tile(int64_t begin, int64_t n, ChunkTrace* trace) const {
    AdamStreams x = streams_of(work_, begin);
    uint64_t random[kTileElements];
    if (rounds_randomly_) {
      const auto step = static_cast<uint32_t>(static_cast<int64_t>(*work_.step));
      tile_random_bits(table_, {options_.rounding_seed, step, work_.index}, work_, begin, n,
                       random);
      x.random = random;
    }
    const bool norms = (options_.track & kTrackNorms) != 0;
    const bool counts_lost = (options_.track & kTrackLost) != 0;
    if (norms || counts_lost) {
      alignas(64) T change[kTileElements];
      const int64_t lost = traced_update(x, change, n);
      if (counts_lost) {
        trace->lost += lost;
      }
      if (norms) {
        trace->grad_sumsq += sum_of_squares(x.grad, work_.grad_dtype, n);
        trace->update_sumsq += sum_of_squares(change, dtype_for<T>, n);
      }
    } else {
      update(x, n);
    }
    if (options_.write_back_gradients) {
      const auto dtype = static_cast<int>(work_.grad_dtype);
      void* grad = element(work_.grad, element_size(work_.grad_dtype), begin);
      table_.scaled_copy[dtype][dtype](grad, grad, static_cast<double>(scalars_.grad_factor), n,
                                       /*past_caches=*/false);
    }
    if ((options_.track & kTrackDigest) != 0) {
      trace->digest += digest_of(table_, work_, begin, n);
    }
  }

  double sum_of_squares(const void* x, DType dtype, int64_t n) const {
    return table_.block_sum_of_squares[static_cast<int>(dtype)](x, n);
  }

  const KernelTable& table_;
  const StepOptions& options_;
  const AdamScalars<T>& scalars_;
  const TensorWork& work_;
  bool past_caches_;
  bool rounds_randomly_;
};

}  // namespace torchopt_ext

// Pass B on a group of elements in a thread's registers: load, update, round, store. The rules are
// those of kernels/adam_step.h; element types and ways to hold a weight are conversions around the
// one formula.
#pragma once

#include "cuda/array.h"
#include "kernels/adam.h"
#include "kernels/block_rule.h"
#include "kernels/digest.h"
#include "kernels/remainder.h"
#include "kernels/stochastic.h"
#include "work/work_list.h"

namespace torchopt_ext {

// The arrays of a tensor, as the threads of a chunk access them.
struct TensorArrays {
  DeviceArray array[kArrays];
};

// What a step reports of an element; see ChunkTrace.
template <int Width>
struct GroupTrace {
  double grad_square[Width];
  double update_square[Width];
  int64_t lost;
  uint64_t digest;
};

namespace {

TORCHOPT_HD inline TensorArrays arrays_of(const TensorWork& work) {
  TensorArrays arrays{};
  for (int a = 0; a < kArrays; ++a) {
    arrays.array[a] = array_of(work.memory[a], element_size(work.layout, a));
  }
  return arrays;
}

// Says of each array whether groups are aligned that start at element `first`, or at any that is a
// multiple of `width` away.
TORCHOPT_HD inline void note_alignment(TensorArrays& arrays, int64_t first, int64_t width) {
  for (DeviceArray& array : arrays.array) {
    array.aligned = is_aligned(address_of(array, first), width * array.size);
  }
}

// One tensor's step.
template <class T>
class AdamGroups {
 public:
  TORCHOPT_HD AdamGroups(const TensorWork& work, const StepOptions& options,
                         const AdamScalars<T>& scalars)
      : work_(work), scalars_(scalars), write_back_(options.write_back_gradients) {
    rounds_randomly_ = rounds_randomly(options, work.layout);
    key_ = {options.rounding_seed,
            rounds_randomly_ ? static_cast<uint32_t>(static_cast<int64_t>(step_of(work))) : 0,
            work.index};
  }

  // Elements [i, i + Width); `trace` is used if Traced.
  template <int Width, bool Traced>
  TORCHOPT_HD void update(const TensorArrays& arrays, int64_t i, GroupTrace<Width>* trace) const {
    const DeviceArray* array = arrays.array;
    const bool amsgrad = array[kMaxExpAvgSq].memory != nullptr;
    // All loads are under way before the first is waited for.
    const auto param = work_.layout.master == Master::kFloat32 ? Bits<T, Width>{}
                                                               : load<T, Width>(array[kParam], i);
    const auto master =
        work_.layout.master == Master::kNone ? Bits<T, Width>{} : load<T, Width>(array[kMaster], i);
    const auto grad = load<T, Width>(array[kGrad], i);
    const auto exp_avg = load<T, Width>(array[kExpAvg], i);
    const auto exp_avg_sq = load<T, Width>(array[kExpAvgSq], i);
    const auto max_exp_avg_sq = amsgrad ? load<T, Width>(array[kMaxExpAvgSq], i) : Bits<T, Width>{};

    T p[Width], g[Width], m[Width], v[Width], vmax[Width];
    weight(param, master, p);
    decode(grad, work_.layout.grad, g);
    decode(exp_avg, work_.layout.state, m);
    decode(exp_avg_sq, work_.layout.state, v);
    decode(max_exp_avg_sq, work_.layout.state, vmax);
    T before[Width];
    for (int k = 0; k < Width; ++k) {
      before[k] = p[k];
      adam_registers<L>(scalars_, p[k], g[k], m[k], v[k], amsgrad ? vmax + k : nullptr);
    }

    uint64_t random[Width] = {};
    if (rounds_randomly_) {
      draw(i, random);
    }
    Stored<Width> stored{};
    set_weight(p, random, stored);
    stored.bits[kExpAvg] = rounded(m, work_.layout.state, random, kExpAvg);
    stored.bits[kExpAvgSq] = rounded(v, work_.layout.state, random, kExpAvgSq);
    store(array[kParam], i, stored.bits[kParam]);
    store(array[kExpAvg], i, stored.bits[kExpAvg]);
    store(array[kExpAvgSq], i, stored.bits[kExpAvgSq]);
    if (amsgrad) {
      stored.bits[kMaxExpAvgSq] = rounded(vmax, work_.layout.state, random, kMaxExpAvgSq);
      store(array[kMaxExpAvgSq], i, stored.bits[kMaxExpAvgSq]);
    }
    if (work_.layout.master != Master::kNone) {
      store(array[kMaster], i, stored.bits[kMaster]);
    }
    if (write_back_) {
      T scaled[Width];
      for (int k = 0; k < Width; ++k) {
        scaled[k] = L::canonical(L::mul(g[k], scalars_.grad_factor));
      }
      store(array[kGrad], i, encode(scaled, work_.layout.grad));
    }
    if constexpr (Traced) {
      T after[Width];
      weight(stored.bits[kParam], stored.bits[kMaster], after);
      T kept[Width];  // exp_avg as stored
      decode(stored.bits[kExpAvg], work_.layout.state, kept);
      fill(*trace, before, after, g, kept);
      trace->digest = digest(arrays, i, stored);
    }
  }

 private:
  using L = ScalarLane<T>;

  // What is stored of a group, by Array.
  template <int Width>
  struct Stored {
    Bits<T, Width> bits[kArrays];
  };

  template <int Width>
  TORCHOPT_HD void weight(const Bits<T, Width>& param, const Bits<T, Width>& master,
                          T (&p)[Width]) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (work_.layout.master == Master::kFloat32) {
        decode(master, DType::kFloat32, p);
        return;
      }
      if (work_.layout.master == Master::kRemainder) {
        for (int k = 0; k < Width; ++k) {
          p[k] = join({half_bits(param, k)}, static_cast<int16_t>(half_bits(master, k)));
        }
        return;
      }
    }
    decode(param, work_.layout.param, p);
  }

  template <int Width>
  TORCHOPT_HD void set_weight(const T (&p)[Width], const uint64_t (&random)[Width],
                              Stored<Width>& stored) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (work_.layout.master == Master::kFloat32) {
        stored.bits[kParam] = encode(p, work_.layout.param);
        stored.bits[kMaster] = encode(p, DType::kFloat32);
        return;
      }
      if (work_.layout.master == Master::kRemainder) {
        stored.bits[kParam] = {};
        stored.bits[kMaster] = {};
        for (int k = 0; k < Width; ++k) {
          const SplitFloat parts = split(p[k]);
          set_half_bits(stored.bits[kParam], k, parts.weight.bits);
          set_half_bits(stored.bits[kMaster], k, static_cast<uint16_t>(parts.remainder));
        }
        return;
      }
    }
    stored.bits[kParam] = rounded(p, work_.layout.param, random, kParam);
  }

  template <int Width>
  TORCHOPT_HD Bits<T, Width> rounded(const T (&x)[Width], DType dtype,
                                     const uint64_t (&random)[Width], Array draw) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (rounds_randomly_ && dtype == DType::kBFloat16) {
        Bits<T, Width> bits{};
        for (int k = 0; k < Width; ++k) {
          set_half_bits(bits, k, narrow_stochastic(x[k], random[k], draw).bits);
        }
        return bits;
      }
    }
    return encode(x, dtype);
  }

  // The random bits of elements [i, i + Width); two that share a block compute it once.
  template <int Width>
  TORCHOPT_HD void draw(int64_t i, uint64_t (&random)[Width]) const {
    PhiloxBlock block{};
    uint64_t index = ~uint64_t{0};
    for (int k = 0; k < Width; ++k) {
      const auto element = static_cast<uint64_t>(global_element(work_, i + k));
      if (element / 2 != index) {
        index = element / 2;
        block = philox(key_, index);
      }
      random[k] = random_of(block, element % 2 == 1);
    }
  }

  template <int Width>
  TORCHOPT_HD void fill(GroupTrace<Width>& trace, const T (&before)[Width], const T (&after)[Width],
                        const T (&g)[Width], const T (&m)[Width]) const {
    trace.lost = 0;
    for (int k = 0; k < Width; ++k) {
      trace.grad_square[k] = square(g[k]);
      trace.update_square[k] = square(L::sub(after[k], before[k]));
      trace.lost += L::count_lost(before[k], after[k], m[k], scalars_.has_decay);
    }
  }

  template <int Width>
  TORCHOPT_HD uint64_t digest(const TensorArrays& arrays, int64_t i,
                              const Stored<Width>& stored) const {
    uint64_t sum = 0;
    for (int index = kParam; index < kWritten; ++index) {
      const DeviceArray& array = arrays.array[index];
      if (array.memory == nullptr) {
        continue;
      }
      const uint32_t salt = digest_salt(work_.index, index);
      for (int k = 0; k < Width; ++k) {
        const auto element = static_cast<uint64_t>(global_element(work_, i + k));
        sum += digest_of(salt, element, stored.bits[index], array.size, k);
      }
    }
    return sum;
  }

  template <int Width>
  TORCHOPT_HD static uint64_t digest_of(uint32_t salt, uint64_t element, const Bits<T, Width>& bits,
                                        int64_t size, int k) {
    if constexpr (sizeof(T) == sizeof(double)) {
      return digest_element(salt, element, uint64_t{bits.word[2 * k + 1]} << 32 | bits.word[2 * k]);
    } else {
      return size == 2 ? digest_element(salt, element, half_bits(bits, k))
                       : digest_element(salt, element, bits.word[k]);
    }
  }

  const TensorWork& work_;
  const AdamScalars<T>& scalars_;
  RoundingKey key_;
  bool write_back_;
  bool rounds_randomly_;
};

}  // namespace
}  // namespace torchopt_ext

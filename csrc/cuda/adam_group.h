// Pass B on a group of elements in a thread's registers: load, update, round, store. The rules are
// those of cpu/adam_slice.h; element types and ways to hold a weight are conversions around the one
// formula.
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
  enum Index { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kCount };
  Array array[kCount];
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
  const int64_t state = element_size(work.state_dtype);
  return {{array_of(work.param, element_size(work.param_dtype)),
           array_of(work.grad, element_size(work.grad_dtype)), array_of(work.exp_avg, state),
           array_of(work.exp_avg_sq, state), array_of(work.max_exp_avg_sq, state),
           array_of(work.master, work.weights == Weights::kRemainder ? 2 : 4)}};
}

// Says of each array whether groups are aligned that start at element `first`, or at any that is a
// multiple of `width` away.
TORCHOPT_HD inline void note_alignment(TensorArrays& arrays, int64_t first, int64_t width) {
  for (Array& array : arrays.array) {
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
    rounds_randomly_ = rounds_randomly(options, work);
    key_ = {options.rounding_seed,
            rounds_randomly_ ? static_cast<uint32_t>(static_cast<int64_t>(*work.step)) : 0,
            work.index};
  }

  // Elements [i, i + Width); `trace` is used if Traced.
  template <int Width, bool Traced>
  TORCHOPT_HD void update(const TensorArrays& arrays, int64_t i, GroupTrace<Width>* trace) const {
    using A = TensorArrays;
    const Array* array = arrays.array;
    const bool amsgrad = array[A::kMaxExpAvgSq].memory != nullptr;
    // All loads are under way before the first is waited for.
    const auto param =
        work_.weights == Weights::kMaster ? Bits<T, Width>{} : load<T, Width>(array[A::kParam], i);
    const auto master =
        work_.weights == Weights::kPlain ? Bits<T, Width>{} : load<T, Width>(array[A::kMaster], i);
    const auto grad = load<T, Width>(array[A::kGrad], i);
    const auto exp_avg = load<T, Width>(array[A::kExpAvg], i);
    const auto exp_avg_sq = load<T, Width>(array[A::kExpAvgSq], i);
    const auto max_exp_avg_sq =
        amsgrad ? load<T, Width>(array[A::kMaxExpAvgSq], i) : Bits<T, Width>{};

    T p[Width], g[Width], m[Width], v[Width], vmax[Width];
    weight(param, master, p);
    decode(grad, work_.grad_dtype, g);
    decode(exp_avg, work_.state_dtype, m);
    decode(exp_avg_sq, work_.state_dtype, v);
    decode(max_exp_avg_sq, work_.state_dtype, vmax);
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
    stored.bits[A::kExpAvg] = rounded(m, work_.state_dtype, random, kDrawExpAvg);
    stored.bits[A::kExpAvgSq] = rounded(v, work_.state_dtype, random, kDrawExpAvgSq);
    store(array[A::kParam], i, stored.bits[A::kParam]);
    store(array[A::kExpAvg], i, stored.bits[A::kExpAvg]);
    store(array[A::kExpAvgSq], i, stored.bits[A::kExpAvgSq]);
    if (amsgrad) {
      stored.bits[A::kMaxExpAvgSq] = rounded(vmax, work_.state_dtype, random, kDrawMaxExpAvgSq);
      store(array[A::kMaxExpAvgSq], i, stored.bits[A::kMaxExpAvgSq]);
    }
    if (work_.weights != Weights::kPlain) {
      store(array[A::kMaster], i, stored.bits[A::kMaster]);
    }
    if (write_back_) {
      T scaled[Width];
      for (int k = 0; k < Width; ++k) {
        scaled[k] = L::canonical(L::mul(g[k], scalars_.grad_factor));
      }
      store(array[A::kGrad], i, encode(scaled, work_.grad_dtype));
    }
    if constexpr (Traced) {
      T after[Width];
      weight(stored.bits[A::kParam], stored.bits[A::kMaster], after);
      T kept[Width];  // exp_avg as stored
      decode(stored.bits[A::kExpAvg], work_.state_dtype, kept);
      fill(*trace, before, after, g, kept);
      trace->digest = digest(arrays, i, stored);
    }
  }

 private:
  using L = ScalarLane<T>;

  // What is stored of a group, by TensorArrays::Index.
  template <int Width>
  struct Stored {
    Bits<T, Width> bits[TensorArrays::kCount];
  };

  template <int Width>
  TORCHOPT_HD void weight(const Bits<T, Width>& param, const Bits<T, Width>& master,
                          T (&p)[Width]) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (work_.weights == Weights::kMaster) {
        decode(master, DType::kFloat32, p);
        return;
      }
      if (work_.weights == Weights::kRemainder) {
        for (int k = 0; k < Width; ++k) {
          p[k] = join({half_bits(param, k)}, static_cast<int16_t>(half_bits(master, k)));
        }
        return;
      }
    }
    decode(param, work_.param_dtype, p);
  }

  template <int Width>
  TORCHOPT_HD void set_weight(const T (&p)[Width], const uint64_t (&random)[Width],
                              Stored<Width>& stored) const {
    using A = TensorArrays;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (work_.weights == Weights::kMaster) {
        stored.bits[A::kParam] = encode(p, work_.param_dtype);
        stored.bits[A::kMaster] = encode(p, DType::kFloat32);
        return;
      }
      if (work_.weights == Weights::kRemainder) {
        stored.bits[A::kParam] = {};
        stored.bits[A::kMaster] = {};
        for (int k = 0; k < Width; ++k) {
          const SplitFloat parts = split(p[k]);
          set_half_bits(stored.bits[A::kParam], k, parts.weight.bits);
          set_half_bits(stored.bits[A::kMaster], k, static_cast<uint16_t>(parts.remainder));
        }
        return;
      }
    }
    stored.bits[A::kParam] = rounded(p, work_.param_dtype, random, kDrawParam);
  }

  template <int Width>
  TORCHOPT_HD Bits<T, Width> rounded(const T (&x)[Width], DType dtype,
                                     const uint64_t (&random)[Width], Draw draw) const {
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
    using A = TensorArrays;
    constexpr struct {
      A::Index array;
      Role role;
    } kWritten[] = {{A::kParam, kRoleParam},
                    {A::kExpAvg, kRoleExpAvg},
                    {A::kExpAvgSq, kRoleExpAvgSq},
                    {A::kMaxExpAvgSq, kRoleMaxExpAvgSq},
                    {A::kMaster, kRoleMaster}};
    uint64_t sum = 0;
    for (const auto& [index, role] : kWritten) {
      const Array& array = arrays.array[index];
      if (array.memory == nullptr) {
        continue;
      }
      const uint32_t salt = digest_salt(work_.index, role);
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

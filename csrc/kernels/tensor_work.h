// One parameter of a step, as the plan hands it to the kernels of both back ends.
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

// A parameter's arrays: the arrays that a step writes, its step count, and this step's gradient.
// The algorithm says what its states are (algorithm.h).
enum Array {
  kParam,
  kState,  // the first of kMostStates
  kMaster = kState + 3,
  kEma,    // the moving average of the weight (average.h)
  kScale,  // the first of kMostMoments: scales of 8-bit moments, one for each group (quantize.h)
  kStep = kScale + 2,
  kGrad,
  kArrays
};
inline constexpr int kMostStates = kMaster - kState;
inline constexpr int kMostMoments = kStep - kScale;  // of 8 bits: the first states
inline constexpr int kElementArrays = kEma;          // kParam to kMaster: what formulas work on
inline constexpr int kPersistentArrays = kGrad;      // kParam to kStep: arrays kept between steps

// Static, as everything that the kernels' objects of each instruction set compile for themselves.
TORCHOPT_HD static constexpr Array state_array(int k) { return static_cast<Array>(kState + k); }
TORCHOPT_HD static constexpr Array scale_array(int k) { return static_cast<Array>(kScale + k); }

// Elements of a parameter whose numbers differ only in their lowest kStreamBits bits share a
// RoundingStream (stochastic.h) and a digest's base (digest.h).
inline constexpr int kStreamBits = 20;
inline constexpr int64_t kStreamElements = int64_t{1} << kStreamBits;

// The part of a weight that is kept in addition to a 16-bit parameter.
enum class Master : int32_t {
  kNone,
  kFloat32,     // the weight; the parameter is its copy, which is only written
  kRemainder,   // int16: the lower bits that a bf16 parameter lacks (remainder.h)
  kRemainder8,  // int8: the next eight bits of a bf16 parameter
};

// The types of a parameter's arrays. They select the parameter's kernel.
struct Layout {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;  // kInt8: codes of moments (quantize.h)
  Master master = Master::kNone;
  uint32_t states = 0;  // bit k: whether state k is present
  bool operator==(const Layout&) const = default;
};

// The options of a step in addition to the update, the same for all its tensors.
struct StepOptions {
  bool stochastic_rounding = false;   // where rounds_randomly() allows it
  bool write_back_gradients = false;  // also unscales and clips gradients in memory
  // Stores parameters that have an fp32 master past the caches. Only the CPU has such stores.
  bool past_caches = false;
  bool counts_steps = true;  // false: another work list of the same step advances the step counts
  uint32_t track = 0;        // the statistics of each chunk: Track (trace.h)
  uint64_t rounding_seed = 0;
};

// A kernel's options for one tensor.
struct StepMode {
  bool write_back = false;  // StepOptions::write_back_gradients
  bool rounds = false;      // stochastically: rounds_randomly()
  // Stores past the caches: a parameter with an fp32 master is written and not read, and aligned
  // stores past the caches avoid reading its cache lines first.
  bool past_caches = false;
};

enum class Kind : int32_t;  // kinds.h

// Pointers are to dense storage, or null for a missing array. Elements are indexed in storage
// order. A scaled copy uses kParam (written), kGrad (read), their dtypes, numel and row_length.
struct TensorWork {
  void* memory[kArrays];  // if kGrad is null, the step skips the tensor
  int64_t numel;
  int64_t row_length;  // the unit that blocks never cross: block_rule.h
  Layout layout;
  DType ema;  // the dtype of kEma
  Kind kind;
  int32_t group;  // index of the tensor's hyperparameters
  // The whole parameter's index and this shard's place in it. Draws and digests depend on them and
  // not on sharding: element i is element global_element(work, i) of parameter `index`.
  uint32_t index;
  int64_t first_element;
  // The number of elements of the shard that are consecutive in the parameter (whole rows with
  // 8-bit moments), or 0 if all are.
  int64_t run;
  int64_t stride;  // from one such run to the next
  // The number of runs after which `gap` more elements are left out, in a shard that is cut in two
  // dimensions; 0 if it is not.
  int64_t rows;
  int64_t gap;
};

namespace {

TORCHOPT_HD constexpr int64_t element_size(const Layout& layout, int array) {
  switch (array) {
    case kParam:
      return element_size(layout.param);
    case kGrad:
      return element_size(layout.grad);
    case kMaster:
      return layout.master == Master::kRemainder8 ? 1 : layout.master == Master::kRemainder ? 2 : 4;
    default:
      return element_size(layout.state);
  }
}

// Returns the address of an element of a per-element array.
TORCHOPT_HD inline char* element(const TensorWork& work, int array, int64_t i) {
  const int64_t size = array == kEma ? element_size(work.ema) : element_size(work.layout, array);
  return static_cast<char*>(work.memory[array]) + i * size;
}

// Calls visit(k) for the states that are present.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_state(uint32_t states, const Visit& visit) {
  static_assert(kMostStates == 3);
  if ((states & 1) != 0) {
    visit(0);
  }
  if ((states & 2) != 0) {
    visit(1);
  }
  if ((states & 4) != 0) {
    visit(2);
  }
}

// Calls visit(array) for the per-element arrays that a step writes.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_written(const Layout& layout,
                                                                const Visit& visit) {
  visit(kParam);
  for_each_state(
      layout.states, [&](int k) __attribute__((always_inline)) { visit(state_array(k)); });
  if (layout.master != Master::kNone) {
    visit(kMaster);
  }
}

TORCHOPT_HD inline float& step_of(const TensorWork& work) {
  return *static_cast<float*>(work.memory[kStep]);
}

TORCHOPT_HD inline int64_t global_element(const TensorWork& work, int64_t i) {
  if (work.run == 0) {
    return work.first_element + i;
  }
  const int64_t row = i / work.run;
  const int64_t left_out = work.rows == 0 ? 0 : row / work.rows * work.gap;
  return work.first_element + row * work.stride + left_out + i % work.run;
}

// Calls visit(first, last, number of `first`) for the runs of elements [begin, end) of a tensor
// that are consecutive in the whole parameter and share a RoundingStream.
template <class Visit>
[[gnu::always_inline]] inline void for_each_run(const TensorWork& work, int64_t begin, int64_t end,
                                                const Visit& visit) {
  for (int64_t i = begin; i < end;) {
    const auto number = static_cast<uint64_t>(global_element(work, i));
    const int64_t same_stream = kStreamElements - static_cast<int64_t>(number) % kStreamElements;
    const int64_t run = work.run == 0 ? end - i : work.run - i % work.run;
    const int64_t longest = i + (run < same_stream ? run : same_stream);
    const int64_t last = longest < end ? longest : end;
    visit(i, last, number);
    i = last;
  }
}

// Returns false with an fp32 master or int16 remainder, which keep the bits that bf16 loses.
TORCHOPT_HD inline bool weight_may_round_randomly(const Layout& layout) {
  const bool is_exact = layout.master == Master::kFloat32 || layout.master == Master::kRemainder;
  return layout.param == DType::kBFloat16 && !is_exact;
}

// Returns whether a step rounds any array of the tensor stochastically.
TORCHOPT_HD inline bool rounds_randomly(const StepOptions& options, const Layout& layout) {
  return options.stochastic_rounding && (weight_may_round_randomly(layout) ||
                                         (layout.states != 0 && (layout.state == DType::kBFloat16 ||
                                                                 layout.state == DType::kInt8)));
}

}  // namespace
}  // namespace torchopt_ext

// One parameter of a step, from the plan to the kernels of both back ends.
#pragma once

#include "kernels/dtype.h"

namespace torchopt_ext {

// A parameter's arrays: those that a step writes, its step count, and this step's gradient.
enum Array {
  kParam,
  kExpAvg,
  kExpAvgSq,
  kMaxExpAvgSq,
  kMaster,
  kExpAvgScale,  // of quantized moments, one for each group of elements (quantize.h)
  kExpAvgSqScale,
  kStep,
  kGrad,
  kArrays
};
inline constexpr int kWritten = kExpAvgScale;  // arrays of elements, from kParam on
inline constexpr int kKept = kGrad;            // what stays between steps, from kParam on

// Elements of a parameter whose numbers differ in these bits alone share what random bits and
// digests take from the others (stochastic.h).
inline constexpr int kStreamBits = 20;
inline constexpr int64_t kStreamElements = int64_t{1} << kStreamBits;

// What is kept beside a 16-bit parameter.
enum class Master : int32_t {
  kNone,
  kFloat32,     // the weight; the parameter is its copy and written only
  kRemainder,   // int16: what a bf16 parameter lacks (remainder.h)
  kRemainder8,  // int8: the next eight bits of a bf16 parameter
};

// How a parameter's arrays are held. Its kernel is chosen by this.
struct Layout {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;  // of the moments; kInt8: exp_avg_sq is unsigned
  Master master = Master::kNone;
  bool amsgrad = false;
  bool operator==(const Layout&) const = default;
};

// What a step does beyond the update, the same for all its tensors.
struct StepOptions {
  bool stochastic_rounding = false;   // of what rounds_randomly() says
  bool write_back_gradients = false;  // gradients become unscaled and clipped in memory, too
  uint32_t track = 0;                 // what to note of each chunk: Track (trace.h)
  uint64_t rounding_seed = 0;
};

// The layouts that have kernels of their own: those that large models are trained in. Branches on
// types would take a third of the time of 16-bit moments and a tenth of that of fp32 ones.
enum class AdamKind : int32_t {
  kFloat32,
  kFloat64,
  kBFloat16,           // parameter, gradient and moments
  kBFloat16Master,     // parameter and gradient, with fp32 moments and master
  kBFloat16Remainder,  // the same with a remainder
  kBFloat16Rounded,    // as kBFloat16, rounded stochastically
  kGeneral,            // any but float64 and 8-bit moments
  kInt8Float32,        // fp32 parameter and gradient; from here on all have 8-bit moments
  kInt8BFloat16,       // the same in bf16
  kInt8Rounded,        // as kInt8BFloat16, rounded stochastically
  kInt8Remainder8,     // as kInt8BFloat16, with a remainder of 8 bits
  kInt8,               // any with 8-bit moments
};
inline constexpr int kAdamKinds = 12;

// Pointers are to dense storage, null where there is no such array; element index is storage order.
// A scaled copy uses kParam, which it writes, kGrad, which it reads, their dtypes and numel.
struct TensorWork {
  void* memory[kArrays];  // without kGrad the tensor takes no part in this step
  int64_t numel;
  int64_t row_length;  // the unit that blocks never cross: block_rule.h
  Layout layout;
  AdamKind kind;
  int32_t group;  // index of its hyperparameters
  // The whole parameter's index and this shard's place in it, for draws and digests, which do not
  // depend on sharding: element i is element global_element(work, i) of parameter `index`.
  uint32_t index;
  int64_t first_element;
  // Elements of the shard that follow one another in the parameter, whole rows with 8-bit moments;
  // 0: all do.
  int64_t run;
  int64_t stride;  // from one such run to the next
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

// Calls visit(array) for the arrays of elements that a step writes.
template <class Visit>
[[gnu::always_inline]] TORCHOPT_HD inline void for_each_written(const Layout& layout,
                                                                const Visit& visit) {
  visit(kParam);
  visit(kExpAvg);
  visit(kExpAvgSq);
  if (layout.amsgrad) {
    visit(kMaxExpAvgSq);
  }
  if (layout.master != Master::kNone) {
    visit(kMaster);
  }
}

TORCHOPT_HD inline float& step_of(const TensorWork& work) {
  return *static_cast<float*>(work.memory[kStep]);
}

TORCHOPT_HD inline int64_t global_element(const TensorWork& work, int64_t i) {
  return work.first_element + (work.run == 0 ? i : i / work.run * work.stride + i % work.run);
}

// Calls visit(first, last, number of the first one) for the runs of elements [begin, end) of a
// tensor that follow one another in the whole parameter, with numbers of one RoundingStream.
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

TORCHOPT_HD inline bool weight_may_round_randomly(const Layout& layout) {
  const bool is_exact = layout.master == Master::kFloat32 || layout.master == Master::kRemainder;
  return layout.param == DType::kBFloat16 && !is_exact;
}

// Whether what a step stores of a tensor takes random bits: not where an fp32 master or an int16
// remainder keeps what the parameter loses.
TORCHOPT_HD inline bool rounds_randomly(const StepOptions& options, const Layout& layout) {
  return options.stochastic_rounding &&
         (weight_may_round_randomly(layout) || layout.state == DType::kBFloat16 ||
          layout.state == DType::kInt8);
}

TORCHOPT_HD constexpr bool is_quantized(AdamKind kind) { return kind >= AdamKind::kInt8Float32; }

TORCHOPT_HD constexpr Layout layout_of(AdamKind kind) {
  constexpr DType kHalf = DType::kBFloat16;
  switch (kind) {
    case AdamKind::kFloat64:
      return {DType::kFloat64, DType::kFloat64, DType::kFloat64, Master::kNone, false};
    case AdamKind::kBFloat16:
    case AdamKind::kBFloat16Rounded:
      return {kHalf, kHalf, kHalf, Master::kNone, false};
    case AdamKind::kBFloat16Master:
      return {kHalf, kHalf, DType::kFloat32, Master::kFloat32, false};
    case AdamKind::kBFloat16Remainder:
      return {kHalf, kHalf, DType::kFloat32, Master::kRemainder, false};
    case AdamKind::kInt8Float32:
      return {DType::kFloat32, DType::kFloat32, DType::kInt8, Master::kNone, false};
    case AdamKind::kInt8BFloat16:
    case AdamKind::kInt8Rounded:
      return {kHalf, kHalf, DType::kInt8, Master::kNone, false};
    case AdamKind::kInt8Remainder8:
      return {kHalf, kHalf, DType::kInt8, Master::kRemainder8, false};
    default:
      return {};
  }
}

TORCHOPT_HD constexpr bool is_general(AdamKind kind) {
  return kind == AdamKind::kGeneral || kind == AdamKind::kInt8;
}

TORCHOPT_HD constexpr bool is_rounded(AdamKind kind) {
  return kind == AdamKind::kBFloat16Rounded || kind == AdamKind::kInt8Rounded;
}

// What a kernel of this kind is compiled for of a tensor's layout and of the options: of what is
// constant no branches are left.
template <AdamKind kKind>
[[gnu::always_inline]] TORCHOPT_HD inline Layout known_layout(const Layout& layout) {
  Layout known = is_general(kKind) ? layout : layout_of(kKind);
  if (kKind == AdamKind::kFloat32 || kKind == AdamKind::kFloat64) {
    known.amsgrad = layout.amsgrad;
  }
  return known;
}
template <AdamKind kKind>
TORCHOPT_HD inline bool rounds_randomly(const StepOptions& options, const Layout& layout) {
  return is_general(kKind) ? rounds_randomly(options, layout) : is_rounded(kKind);
}
template <AdamKind kKind>
TORCHOPT_HD inline bool writes_back(const StepOptions& options) {
  return (is_general(kKind) || kKind == AdamKind::kFloat64) && options.write_back_gradients;
}

inline AdamKind kind_of(const Layout& layout, const StepOptions& options) {
  if (layout.param == DType::kFloat64) {
    return AdamKind::kFloat64;
  }
  const AdamKind general = layout.state == DType::kInt8 ? AdamKind::kInt8 : AdamKind::kGeneral;
  if (options.write_back_gradients) {
    return general;
  }
  const bool rounds = rounds_randomly(options, layout);
  for (int k = 0; k < kAdamKinds; ++k) {
    const auto kind = static_cast<AdamKind>(k);
    Layout usual = layout_of(kind);
    usual.amsgrad = kind == AdamKind::kFloat32 && layout.amsgrad;
    if (!is_general(kind) && is_rounded(kind) == rounds && layout == usual) {
      return kind;
    }
  }
  return general;
}

}  // namespace
}  // namespace torchopt_ext

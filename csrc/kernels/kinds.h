// The kinds of pass B: layouts with kernels of their own, in which large models are trained.
// Branches on types would take a third of the time with 16-bit moments and a tenth with fp32
// moments.
#pragma once

#include "kernels/tensor_work.h"

namespace torchopt_ext {

enum class AdamKind : int32_t {
  kFloat32,
  kFloat64,
  kBFloat16,           // parameter, gradient and moments
  kBFloat16Master,     // parameter and gradient, with fp32 moments and master
  kBFloat16Remainder,  // as kBFloat16Master, with a 16-bit remainder
  kBFloat16Rounded,    // as kBFloat16, rounded stochastically
  kGeneral,            // any layout except float64 and 8-bit moments
  kInt8Float32,        // fp32 parameter and gradient, 8-bit moments
  kInt8BFloat16,       // bf16 parameter and gradient
  kInt8Rounded,        // as kInt8BFloat16, rounded stochastically
  kInt8Remainder8,     // as kInt8BFloat16, with a remainder of 8 bits
  kInt8,               // any layout with 8-bit moments
};
inline constexpr int kAdamKinds = 12;

// What the kernels of a kind know at compile time. Unless the kind is general, the layout and
// whether the step rounds are constants, and the compiler removes the branches on them.
struct KindTraits {
  Layout layout;  // of a general kind only whether the moments have 8 bits
  bool general = false;
  bool rounded = false;     // stochastically
  bool amsgrad = false;     // also with amsgrad
  bool write_back = false;  // also with StepOptions::write_back_gradients
  // CPU: whether the main loop takes two registers at once, as it should unless most arrays are
  // fp32 or fp64, and whether one register at a time follows it.
  bool pairs = true;
  bool single_registers = false;
  // CUDA: the elements that a thread takes at once: 16 bytes of the narrowest array, 4 elements
  // with branches on types. Blocks on a multiprocessor without and with tracking (cuda/adam.cu,
  // cuda/adam_traced.cu).
  int width = 8;
  int blocks = 3;
  int traced_blocks = 2;
};

namespace {

// In the order of AdamKind.
constexpr KindTraits kKindTraits[kAdamKinds] = {
    {.layout = {}, .amsgrad = true, .pairs = false, .width = 4, .blocks = 4, .traced_blocks = 3},
    {.layout = {DType::kFloat64, DType::kFloat64, DType::kFloat64},
     .amsgrad = true,
     .write_back = true,
     .width = 2,
     .blocks = 2},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
     .single_registers = true,
     .blocks = 4,
     .traced_blocks = 3},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kFloat32},
     .pairs = false,
     .blocks = 4,
     .traced_blocks = 3},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, Master::kRemainder},
     .blocks = 4,
     .traced_blocks = 3},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16}, .rounded = true},
    {.layout = {}, .general = true, .write_back = true, .width = 4},
    {.layout = {DType::kFloat32, DType::kFloat32, DType::kInt8}},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8}},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8}, .rounded = true},
    {.layout = {DType::kBFloat16, DType::kBFloat16, DType::kInt8, Master::kRemainder8}},
    {.layout = {.state = DType::kInt8},
     .general = true,
     .write_back = true,
     .blocks = 2,
     .traced_blocks = 1},
};

constexpr const KindTraits& traits_of(AdamKind kind) { return kKindTraits[static_cast<int>(kind)]; }

// In a kernel, whose kind is a constant. CUDA calls no constexpr function of the host.
template <AdamKind kKind>
inline constexpr KindTraits kTraits =
    traits_of(kKind);  // NOLINT(modernize-avoid-c-style-cast): clang-tidy sees (AdamKind)3

constexpr bool is_quantized(AdamKind kind) { return traits_of(kind).layout.state == DType::kInt8; }

// The functions below return a layout and options as a kernel of kind kKind sees them.
template <AdamKind kKind>
[[gnu::always_inline]] TORCHOPT_HD inline Layout known_layout(const Layout& layout) {
  constexpr Layout kConstant = kTraits<kKind>.layout;
  Layout known = kTraits<kKind>.general ? layout : kConstant;
  if (kTraits<kKind>.amsgrad) {
    known.amsgrad = layout.amsgrad;
  }
  return known;
}
template <AdamKind kKind>
[[gnu::always_inline]] TORCHOPT_HD inline StepMode known_mode(const StepOptions& options,
                                                              const Layout& layout) {
  constexpr KindTraits kKnown = kTraits<kKind>;
  return {.write_back = kKnown.write_back && options.write_back_gradients,
          .rounds = kKnown.general ? rounds_randomly(options, layout) : kKnown.rounded};
}

inline AdamKind kind_of(const Layout& layout, const StepOptions& options) {
  const bool rounds = rounds_randomly(options, layout);
  int kind = 0;
  const auto fits = [&](const KindTraits& traits) {
    if (traits.general) {
      return (traits.layout.state == DType::kInt8) == (layout.state == DType::kInt8);
    }
    Layout usual = traits.layout;
    usual.amsgrad = traits.amsgrad && layout.amsgrad;
    return layout == usual && rounds == traits.rounded &&
           (traits.write_back || !options.write_back_gradients);
  };
  while (!fits(kKindTraits[kind])) {
    ++kind;
  }
  return static_cast<AdamKind>(kind);
}

}  // namespace
}  // namespace torchopt_ext

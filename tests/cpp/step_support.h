// One tensor's memory, and a step on it: by the kernels of one instruction set, and by the bodies
// of the CUDA kernels, run on the host through loops over grid, block and thread.
#pragma once

#include <algorithm>
#include <array>
#include <sstream>
#include <string>

#include "cpu/kernel_table.h"
#include "cuda/average.h"
#include "cuda/traced.h"
#include "host_cta.h"
#include "kernels/trace.h"
#include "support.h"

namespace torchopt_ext {

// The settings of one tested step.
struct Case {
  Layout layout{};
  Algorithm algorithm = kNumberOf<Adam>;
  StepOptions options{};
  int64_t rows = 1;
  int64_t row_length = 1;
  unsigned seed = 1;
  int64_t first_element = 0;  // place of the tensor in its parameter
  bool averages = false;      // keeps a moving average of the weight
  DType ema = DType::kFloat32;
  // Where each array starts in its allocation, in elements, by Array; ignored for scales.
  std::array<int64_t, kArrays> offsets{};
};

// The states for which `has` is true, as bits.
template <class Has>
uint32_t states_that(Algorithm algorithm, const Has& has) {
  uint32_t states = 0;
  uint32_t bit = 1;
  for (const StateSpec& state : declaration_of(algorithm).states) {
    states |= has(state) ? bit : 0;
    bit *= 2;
  }
  return states;
}
inline uint32_t required_states(Algorithm algorithm) {
  return states_that(algorithm, [](const StateSpec& state) { return state.when == nullptr; });
}

inline std::string describe(const Case& c) {
  std::ostringstream text;
  text << declaration_of(c.algorithm).name << " param " << static_cast<int>(c.layout.param)
       << " grad " << static_cast<int>(c.layout.grad) << " state "
       << static_cast<int>(c.layout.state) << " master " << static_cast<int>(c.layout.master)
       << " states " << c.layout.states << " random " << c.options.stochastic_rounding
       << " write back " << c.options.write_back_gradients << " track " << c.options.track
       << " average " << c.averages << " of " << static_cast<int>(c.ema) << " rows " << c.rows
       << " x " << c.row_length << " offsets";
  for (const int64_t offset : c.offsets) {
    text << " " << offset;
  }
  return text.str();
}

// Returns every supported combination of dtypes and masters.
inline std::vector<Case> every_way_to_hold() {
  std::vector<Case> all;
  std::vector<DType> states(std::begin(kAllDTypes), std::end(kAllDTypes));
  states.push_back(DType::kInt8);
  for (const DType param : kAllDTypes) {
    const bool is_half = param == DType::kBFloat16 || param == DType::kFloat16;
    for (const DType grad : kAllDTypes) {
      for (const DType state : states) {
        for (const Master master :
             {Master::kNone, Master::kFloat32, Master::kRemainder, Master::kRemainder8}) {
          const bool one_is_wide = param == DType::kFloat64 || grad == DType::kFloat64;
          const bool one_is_single = param == DType::kFloat32 || grad == DType::kFloat32;
          const bool grad_fits = grad == param || (one_is_single && !one_is_wide);
          const bool state_fits = (state == DType::kFloat64) == (param == DType::kFloat64);
          const bool master_fits = master == Master::kNone ||
                                   (master == Master::kFloat32 && is_half) ||
                                   param == DType::kBFloat16;
          if (grad_fits && state_fits && master_fits) {
            all.push_back({.layout = {param, grad, state, master}});
          }
        }
      }
    }
  }
  return all;
}

class Tensor {
 public:
  explicit Tensor(const Case& c) : case_(c) {
    const int64_t n = c.rows * c.row_length;
    Layout& held = case_.layout;
    held.states |= required_states(c.algorithm);
    const DType ema = held.param == DType::kFloat64 ? held.param : c.ema;
    const DType dtypes[] = {held.param,      held.state, held.state,      held.state,
                            DType::kFloat32, ema,        DType::kFloat32, DType::kFloat32,
                            DType::kFloat32, held.grad};
    const int spreads[] = {2, 10, 10, 10, 2, 2, 8, 8, 2, 12};
    for (unsigned a = 0; a < kArrays; ++a) {
      size_[a] = element_size(dtypes[a]);
      memory_[a] = random_elements(dtypes[a], n + kSlack, spreads[a], c.seed + a);
    }
    size_[kMaster] = element_size(held, kMaster);
    const bool quantized = held.state == DType::kInt8;
    std::vector<Array> positive{scale_array(0), scale_array(1)};
    if (!quantized) {
      positive.insert(positive.end(), {kExpAvgSq, kMaxExpAvgSq});
    }
    for (const Array squares : positive) {  // clear sign bits
      for (size_t i = static_cast<size_t>(size_[squares]) - 1; i < memory_[squares].size();
           i += static_cast<size_t>(size_[squares])) {
        memory_[squares][i] &= 0x7f;
      }
    }
    work.numel = n;
    work.row_length = c.row_length;
    work.layout = held;
    work.ema = ema;
    work.kind = kind_of(c.algorithm, held, c.options, c.row_length % kQuantGroup == 0);
    work.index = 7;
    work.first_element = c.first_element;
    if (held.master == Master::kRemainder || held.master == Master::kRemainder8) {
      point();
      const std::vector<unsigned char> floats = random_elements(DType::kFloat32, n, 2, c.seed);
      for (int64_t i = 0; i < n; ++i) {
        float x = 0.0f;
        std::memcpy(&x, floats.data() + i * 4, 4);
        if (held.master == Master::kRemainder) {
          set_parts(i, split(x));
        } else {
          set_parts(i, split8(x));
        }
      }
    }
  }

  // Points `work` to this object's memory: a copied object has its own memory.
  void point() {
    for (unsigned a = 0; a < kArrays; ++a) {
      work.memory[a] = memory_[a].data() + case_.offsets[a] * size_[a];
    }
    for (int k = 0; k < kMostStates; ++k) {
      if ((case_.layout.states >> k & 1) == 0) {
        work.memory[state_array(k)] = nullptr;
      }
    }
    if (case_.layout.master == Master::kNone) {
      work.memory[kMaster] = nullptr;
    }
    if (!case_.averages) {
      work.memory[kEma] = nullptr;
    }
    for (const Array scale : {scale_array(0), scale_array(1)}) {
      const bool used = work.memory[state_array(scale - kScale)] != nullptr;
      work.memory[scale] =
          used && case_.layout.state == DType::kInt8 ? memory_[scale].data() : nullptr;
    }
    work.memory[kStep] = &step;
  }

  // Compares all memory, also outside of the elements.
  bool same_bits(const Tensor& other) const {
    return memory_ == other.memory_ && step == other.step;
  }
  const std::vector<unsigned char>& memory(Array a) const { return memory_[a]; }
  std::vector<unsigned char>& memory(Array a) { return memory_[a]; }
  int64_t size(Array a) const { return size_[a]; }
  const StepOptions& options() const { return case_.options; }

  float step = 3.0f;
  TensorWork work{};

 private:
  static constexpr int64_t kSlack = 16;

  template <class Remainder>
  void set_parts(int64_t i, const SplitFloat<Remainder>& parts) {
    static_cast<BFloat16*>(work.memory[kParam])[i] = parts.weight;
    static_cast<Remainder*>(work.memory[kMaster])[i] = parts.remainder;
  }

  Case case_;
  std::array<std::vector<unsigned char>, kArrays> memory_;
  std::array<int64_t, kArrays> size_{};
};

struct Group {
  Algorithm algorithm = kNumberOf<Adam>;
  Hyper hyper{};
};

inline Group hyper_of(int variant, Algorithm algorithm = kNumberOf<Adam>) {
  Group group{.algorithm = algorithm};
  double* value = group.hyper.value;
  for (const HyperSpec& spec : declaration_of(algorithm).hypers) {
    const auto i = value - group.hyper.value;  // a beta is also below 0.5, where averages differ
    *value++ =
        spec.range == Range::kBelowOne && variant % (i - kCommonHypers + 2) == 0 ? 0.3 : spec.usual;
  }
  value = group.hyper.value;
  value[kLr] = 1e-2;
  value[kWeightDecay] = variant % 4 == 3 ? 0.0 : 0.1;
  value[kDecoupled] = variant % 5 != 0 ? 1.0 : 0.0;
  value[kMaximize] = variant % 7 == 0 ? 1.0 : 0.0;
  if (value[kDecoupled] != 0.0) {
    value[kCautious] = variant % 3 == 1 ? 1.0 : 0.0;
    value[kPeakLr] = variant % 4 == 2 ? 0.03 : 0.0;
  }
  if (algorithm == kNumberOf<Sgd>) {
    value[Sgd::kMomentum] = 0.9;
    value[Sgd::kNesterov] = variant % 2 == 0 ? 1.0 : 0.0;
    value[Sgd::kDampening] = variant % 2 == 0 ? 0.0 : 0.3;
  }
  return group;
}

inline Control control_of_a_step() {
  Control control{};
  control.grad_factor = 0.37;
  control.lr_factor = 0.75;
  control.grad_scale = 2.0;
  return control;
}

// A step's report of one tensor.
struct Report {
  std::vector<ChunkTrace> chunks;
  std::array<double, 2> norms{};
  int64_t lost = 0;

  bool same_bits(const Report& other) const {
    const auto same = [](double a, double b) {
      return bit_cast<uint64_t>(a) == bit_cast<uint64_t>(b);
    };
    const auto same_trace = [&](const ChunkTrace& a, const ChunkTrace& b) {
      return same(a.grad_sumsq, b.grad_sumsq) && same(a.update_sumsq, b.update_sumsq) &&
             a.lost == b.lost;
    };
    return std::ranges::equal(chunks, other.chunks, same_trace) &&
           std::ranges::equal(norms, other.norms, same) && lost == other.lost;
  }
};

inline Report step_on_cpu(const KernelTable& table, Tensor& tensor, Group group,
                          const Control& control, int64_t chunk_elements = kChunkElements,
                          bool past_caches = false) {
  tensor.point();
  tensor.step += 1.0f;
  group.hyper.value[kLr] *= control.lr_factor;
  const auto step = static_cast<int64_t>(tensor.step);
  const TensorScalars scalars{
      scalars_of<float>(group.algorithm, group.hyper, step, control.grad_factor),
      scalars_of<double>(group.algorithm, group.hyper, step, control.grad_factor)};
  Report report;
  ChunkTrace sum{};
  for (const Chunk& chunk : make_chunks({tensor.work}, chunk_elements)) {
    StepOptions options = tensor.options();
    options.past_caches = past_caches;
    if (options.track != 0) {
      report.chunks.push_back(
          table.traced(table, scalars, tensor.work, options, chunk.begin, chunk.end()));
      add_trace(sum, report.chunks.back());
    } else {
      table.update[static_cast<int>(tensor.work.kind)](scalars, tensor.work, options, chunk.begin,
                                                       chunk.end(), /*change=*/nullptr);
    }
    if (tensor.work.memory[kEma] != nullptr) {
      table.average[is_double(tensor.work.kind) ? 1 : 0](tensor.work, options, chunk.begin,
                                                         chunk.end(), control.ema_weight);
    }
  }
  if (tensor.options().track != 0) {
    finish_trace(sum, control, true, report.norms.data(), report.lost);
  }
  return report;
}

inline Report step_as_cuda(Tensor& tensor, const Group& group, const Control& control, int threads,
                           int64_t chunk_elements = 2048) {
  tensor.point();
  const StepOptions& options = tensor.options();
  std::vector<Chunk> chunks;
  if (options.track != 0) {
    chunks = make_chunks({tensor.work});
  } else {
    add_plain_chunks({tensor.work}, [=](const TensorWork&) { return chunk_elements; }, chunks);
  }
  TensorStep step{};
  Report report;
  UpdateArgs args{};
  args.tensors = &tensor.work;
  args.chunks = chunks.data();
  args.steps = &step;
  args.control = &control;
  args.options = options;
  const PrepareKernel<1> prepare{{},
                                 {0, 1, {tensor.work.memory[kGrad]}},
                                 {0, 1, {{group.algorithm, group.hyper, nullptr, DType::kFloat64}}},
                                 args};
  run_on_host(prepare, 1);
  report.chunks.resize(options.track != 0 ? chunks.size() : 0);
  const auto blocks = static_cast<int64_t>(chunks.size());
  const int64_t first_chunks[] = {0, blocks};
  const TraceArgs traces{first_chunks, report.chunks.data(), report.norms.data(), &report.lost};
  if (options.track == 0) {
    with_kind(tensor.work.kind, [&](auto constant) {
      run_on_host(UpdateKernel<static_cast<int>(constant())>{{}, args}, blocks, threads);
    });
  } else {
    for (int k = 0; k < kKinds; ++k) {  // as a step over tensors of all kinds does
      with_kind(static_cast<Kind>(k), [&](auto constant) {
        run_on_host(TracedKernel<static_cast<int>(constant())>{{}, args, traces}, blocks, threads);
      });
    }
    run_on_host(SumTracesKernel{{}, args, traces}, 1);
  }
  if (tensor.work.memory[kEma] != nullptr) {
    run_on_host(AverageKernel{{}, args}, blocks, threads);
  }
  return report;
}

}  // namespace torchopt_ext

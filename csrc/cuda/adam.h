// Pass B as bodies of CUDA kernels, templates over the block of threads (cta.h): first the step
// counts and scalars of each tensor, then its elements by the rules of kernels/adam_step.h.
#pragma once

#include "cuda/cta.h"
#include "cuda/gradients.h"
#include "cuda/vector_lane.h"
#include "kernels/adam_step.h"
#include "kernels/control.h"
#include "work/work_list.h"

namespace torchopt_ext {

inline constexpr int kAdamThreads = 256;

// A param group's arguments; a learning rate on the device replaces the number.
struct GroupArgs {
  AdamHyper hyper;
  const void* lr;
  DType lr_dtype;
};

// Consecutive groups as a kernel's parameter, as Gradients are. More groups take several launches.
struct Groups {
  static constexpr int kMost = 64;

  int32_t first;
  int32_t count;
  GroupArgs group[kMost];
};
static_assert(sizeof(Gradients) + sizeof(Groups) < 32000);

// A tensor's part in this step.
struct TensorStep {
  void* grad;  // null: none
  TensorScalars scalars;
};

// Pointers are to device memory.
struct AdamArgs {
  const TensorWork* tensors;  // whose gradients are in `steps`
  const Chunk* chunks;        // one for each block
  TensorStep* steps;          // of each tensor
  const Control* control;
  StepOptions options;
};

namespace {

TORCHOPT_HD inline double learning_rate(const GroupArgs& group) {
  if (group.lr == nullptr) {
    return group.hyper.lr;
  }
  return group.lr_dtype == DType::kFloat64
             ? *static_cast<const double*>(group.lr)
             : static_cast<double>(*static_cast<const float*>(group.lr));
}

// Counts the step of the i-th of the gradients' tensors, if it takes part and is of one of the
// groups, and computes its scalars.
template <int kTensors>
TORCHOPT_HD inline void prepare_body(int i, const AdamArgs& args,
                                     const GradientsOf<kTensors>& gradients, const Groups& groups) {
  if (i >= gradients.count) {
    return;
  }
  const int tensor = gradients.first + i;
  const TensorWork& work = args.tensors[tensor];
  const int g = work.group - groups.first;
  if (g < 0 || g >= groups.count) {
    return;
  }
  TensorStep& step = args.steps[tensor];
  step.grad = args.control->skip != 0.0 ? nullptr : gradients.memory[i];
  if (step.grad == nullptr) {
    return;
  }
  const GroupArgs& group = groups.group[g];
  AdamHyper hyper = group.hyper;
  hyper.lr = ScalarLane<double>::mul(learning_rate(group), args.control->lr_factor);
  step_of(work) = ScalarLane<float>::add(step_of(work), 1.0f);
  const auto count = static_cast<int64_t>(step_of(work));
  const double factor = args.control->grad_factor;
  if (work.kind == AdamKind::kFloat64) {
    step.scalars.as_double = adam_scalars<double>(hyper, count, factor);
  } else {
    step.scalars.as_float = adam_scalars<float>(hyper, count, factor);
  }
}

// The random bits of a register of elements from i on.
template <class L>
TORCHOPT_HD inline typename L::Random draw(const TensorWork& work, const RoundingKey& key,
                                           int64_t i) {
  typename L::Random random;
  RoundingStream stream{};
  uint64_t upper = ~uint64_t{0};
  unrolled<L::width>([&](int k) {
    const auto element = static_cast<uint64_t>(global_element(work, i + L::offset(k)));
    if (element >> kStreamBits != upper) {
      upper = element >> kStreamBits;
      stream = rounding_stream(key, element);
    }
    random.element[k] = random_words<ScalarWords>(stream, static_cast<uint32_t>(element));
  });
  return random;
}

// Elements of a thread at once: 16 bytes of the narrowest array, or 4 where types are told apart.
TORCHOPT_HD constexpr int register_width(AdamKind kind) {
  switch (kind) {
    case AdamKind::kFloat64:
      return 2;
    case AdamKind::kFloat32:
    case AdamKind::kGeneral:
      return 4;
    default:
      return 8;
  }
}

// A chunk of a tensor of a step. Elements are counted from its first.
template <class T>
struct AdamChunk {
  TORCHOPT_HD AdamChunk(const AdamArgs& args, const Chunk& chunk)
      : work(args.tensors[chunk.tensor]),
        scalars(scalars_in<T>(args.steps[chunk.tensor].scalars)),
        options(args.options),
        begin(chunk.begin),
        n(chunk.count) {
    const auto point = [&](int array, void* memory) {
      x[array] = memory == nullptr
                     ? memory
                     : static_cast<char*>(memory) + begin * element_size(work.layout, array);
    };
    unrolled<kWritten>([&](int array) { point(array, work.memory[array]); });
    point(kGrad, args.steps[chunk.tensor].grad);
  }

  template <class L>
  TORCHOPT_HD void update(const L& lane, const Layout& layout, const StepMode& mode, bool at_random,
                          int i) const {
    if (at_random) {
      const auto random = draw<L>(work, rounding_key(options, work), begin + i);
      adam_step(lane, scalars, layout, mode, x, i, &random);
    } else {
      adam_step(lane, scalars, layout, mode, x, i, static_cast<const typename L::Random*>(nullptr));
    }
  }

  const TensorWork& work;
  const AdamScalars<T> scalars;
  const StepOptions& options;
  const int64_t begin;
  const int n;
  void* x[kArrays] = {};  // those of elements
};

template <AdamKind kKind, class Cta>
TORCHOPT_HD inline void adam_body(const Cta& cta, const AdamArgs& args) {
  using T = std::conditional_t<kKind == AdamKind::kFloat64, double, float>;
  constexpr int kWidth = register_width(kKind);
  const Chunk chunk = args.chunks[cta.block];
  if (args.steps[chunk.tensor].grad == nullptr) {
    return;
  }
  const AdamChunk<T> elements(args, chunk);
  const Layout layout = known_layout<kKind>(elements.work.layout);
  const StepMode mode{.write_back = writes_back<kKind>(args.options)};
  const bool at_random = rounds_randomly<kKind>(args.options, layout);
  const Registers registers = aligned_registers(layout, elements.x, kWidth, elements.n);
  cta.each([&](int thread) {
    for_each_register(
        registers, kWidth, elements.n, thread, cta.threads,
        [&](int i) { elements.update(VectorLane<T, kWidth>{}, layout, mode, at_random, i); },
        [&](int i) { elements.update(VectorLane<T, 1>{}, layout, mode, at_random, i); });
  });
}

}  // namespace

// Before launch_adam, once for every range of tensors and groups.
template <int kTensors>
void launch_prepare(const AdamArgs& args, const GradientsOf<kTensors>& gradients,
                    const Groups& groups, CUstream_st* stream);
// For each kind that tensors are of.
void launch_adam(AdamKind kind, const AdamArgs& args, int64_t chunk_count, CUstream_st* stream);

}  // namespace torchopt_ext

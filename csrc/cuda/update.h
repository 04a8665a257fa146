// Pass B on CUDA. PrepareKernel computes each tensor's step count and scalars; update_chunk updates
// elements as kernels/step.h says.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/gradients.h"
#include "cuda/launch.h"
#include "cuda/vector_lane.h"
#include "kernels/control.h"
#include "kernels/step.h"
#include "work/work_list.h"

namespace torchopt_ext {

inline constexpr int kUpdateThreads = 256;

// A param group's arguments.
struct ParamGroupArgs {
  Algorithm algorithm;
  Hyper hyper;
  const void* lr;  // if not null, a learning rate on the device that replaces hyper's
  DType lr_dtype;
};

// Consecutive groups as a kernel parameter, like GradientPointers. More groups take several
// launches.
struct ParamGroups {
  static constexpr int kMost = 38;

  int32_t first;
  int32_t count;
  ParamGroupArgs group[kMost];
};

// A tensor's gradient and scalars in this step.
struct TensorStep {
  void* grad;  // null: the tensor is not updated
  TensorScalars scalars;
};

// Pointers are to device memory.
struct UpdateArgs {
  const TensorWork* tensors;  // their gradients are in `steps`
  const Chunk* chunks;        // one for each block
  TensorStep* steps;          // one for each tensor
  const Control* control;
  StepOptions options;
};

namespace {

TORCHOPT_HD inline double learning_rate(const ParamGroupArgs& group) {
  return group.lr == nullptr ? group.hyper[kLr] : read_number(group.lr, group.lr_dtype);
}

// Returns the random bits of a register of elements from i on.
template <class L>
TORCHOPT_HD inline typename L::Random random_bits_by_element(const TensorWork& work,
                                                             const RoundingKey& key, int64_t i) {
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

// A chunk of a tensor of one kind in a step. Elements are counted from the chunk's first.
template <Kind kKind>
struct UpdateChunk {
  using T = ComputeType<kKind>;

  TORCHOPT_HD UpdateChunk(const UpdateArgs& args, const Chunk& chunk)
      : work(args.tensors[chunk.tensor]),
        options(args.options),
        layout(known_layout<kKind>(work.layout)),
        mode(known_mode<kKind>(options, layout)),
        scalars(scalars_in<T>(args.steps[chunk.tensor].scalars)),
        begin(chunk.begin),
        n(chunk.count) {
    unrolled<kElementArrays>([&](int array) {
      x[array] = work.memory[array] == nullptr ? nullptr : element(work, array, begin);
    });
    x[kGrad] = static_cast<char*>(args.steps[chunk.tensor].grad) +
               begin * element_size(work.layout, kGrad);
  }

  template <class L>
  TORCHOPT_HD ElementsAt<L> at(const L& lane, int64_t i) const {
    return {lane, layout, x, i};
  }
  template <class L>
  TORCHOPT_HD void update(const L& lane, int i) const {
    if (mode.rounds) {
      const auto random = random_bits_by_element<L>(work, rounding_key(options, work), begin + i);
      update_elements<AlgorithmOf<kKind>>(at(lane, i), scalars, mode, &random);
    } else {
      update_elements<AlgorithmOf<kKind>>(at(lane, i), scalars, mode,
                                          static_cast<const typename L::Random*>(nullptr));
    }
  }

  const TensorWork& work;
  const StepOptions& options;
  const Layout layout;
  const StepMode mode;
  const Scalars<T> scalars;
  const int64_t begin;
  const int n;
  void* x[kArrays] = {};  // the arrays of elements
};

template <Kind kKind, class Cta>
TORCHOPT_HD inline void update_chunk(const Cta& cta, const UpdateChunk<kKind>& chunk) {
  using T = ComputeType<kKind>;
  constexpr int kWidth = kTraits<kKind>.width;
  const AlignedRange registers = aligned_registers(chunk.layout, chunk.x, kWidth, chunk.n);
  cta.each([&](int thread) {
    for_each_register(
        registers, kWidth, chunk.n, thread, cta.threads,
        [&](int i) { chunk.update(VectorLane<T, kWidth>{}, i); },
        [&](int i) { chunk.update(VectorLane<T, 1>{}, i); });
  });
}

}  // namespace

// Must run before UpdateKernel, once for every range of tensors and range of groups. A thread
// prepares a tensor of `gradients` if the tensor belongs to one of `groups`: if the tensor is
// updated in this step, advances its step count and computes its scalars.
template <int kTensors>
struct PrepareKernel : KernelOf<kUpdateThreads> {
  GradientPointers<kTensors> gradients;
  ParamGroups groups;
  UpdateArgs args;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    cta.each([&](int thread) { prepare(cta.block * cta.threads + thread); });
  }

 private:
  TORCHOPT_HD void prepare(int64_t i) const {
    if (i >= gradients.count) {
      return;
    }
    const int64_t tensor = gradients.first + i;
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
    const ParamGroupArgs& group = groups.group[g];
    Hyper hyper = group.hyper;
    hyper.value[kLr] = ScalarLane<double>::mul(learning_rate(group), args.control->lr_factor);
    if (args.options.counts_steps) {
      step_of(work) = ScalarLane<float>::add(step_of(work), 1.0f);
    }
    const auto count = static_cast<int64_t>(step_of(work));
    const double factor = args.control->grad_factor;
    if (work.layout.param == DType::kFloat64) {
      step.scalars.as_double = scalars_of<double>(group.algorithm, hyper, count, factor);
    } else {
      step.scalars.as_float = scalars_of<float>(group.algorithm, hyper, count, factor);
    }
  }
};
static_assert(sizeof(PrepareKernel<kMostTensors>) < 32764);  // gradients.h

}  // namespace torchopt_ext

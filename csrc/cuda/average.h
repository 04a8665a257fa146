// Moving averages of weights as a CUDA kernel, after pass B. In the kernels of pass B, which use
// all registers that they may, the averages' lines would make many of them spill. So an fp32
// average moves 12 bytes here, and 8 on the CPU.
#pragma once

#include "cuda/update.h"
#include "kernels/average.h"

namespace torchopt_ext {

namespace {

// Averages the weights of a chunk; T is double for fp64.
template <class T, int kWidth, class Cta>
TORCHOPT_HD inline void average_chunk(const Cta& cta, const UpdateArgs& args, const Chunk& chunk) {
  const TensorWork& work = args.tensors[chunk.tensor];
  const Layout layout = work.layout;
  const DType ema = work.ema;
  const AverageScalars<T> scalars(args.control->ema_weight);
  const RoundingKey key = average_key(args.options, work);
  const bool rounds = rounds_average(work);
  void* x[kArrays] = {};
  bool aligned = true;
  const auto point = [&](Array array) {
    if (work.memory[array] != nullptr) {
      char* const first = element(work, array, chunk.begin);
      const int64_t bytes = element(work, array, chunk.begin + kWidth) - first;
      aligned = aligned && is_aligned(first, bytes < 16 ? bytes : 16);
      x[array] = first;
    }
  };
  point(kParam);
  point(kMaster);
  point(kEma);
  const auto average = [&](const auto& lane, int i) {
    using L = std::remove_cvref_t<decltype(lane)>;
    const ElementsAt<L> at{lane, layout, x, i};
    if (rounds) {
      const auto random = random_bits_by_element<L>(work, key, chunk.begin + i);
      average_elements(at, ema, scalars, &random);
    } else {
      average_elements(at, ema, scalars, static_cast<const typename L::Random*>(nullptr));
    }
  };
  const AlignedRange registers{0, aligned ? chunk.count / kWidth * kWidth : 0};
  cta.each([&](int thread) {
    for_each_register(
        registers, kWidth, chunk.count, thread, cta.threads,
        [&](int i) { average(VectorLane<T, kWidth>{}, i); },
        [&](int i) { average(VectorLane<T, 1>{}, i); });
  });
}

}  // namespace

// Must run last in a step, on chunks of tensors that have averages.
struct AverageKernel : KernelOf<kUpdateThreads, 4> {
  UpdateArgs args;

  template <class Cta>
  TORCHOPT_HD void operator()(const Cta& cta) const {
    const Chunk chunk = args.chunks[cta.block];
    if (args.control->skip != 0.0) {
      return;
    }
    if (args.tensors[chunk.tensor].layout.param == DType::kFloat64) {
      average_chunk<double, 2>(cta, args, chunk);
    } else {
      average_chunk<float, 4>(cta, args, chunk);
    }
  }
};

}  // namespace torchopt_ext

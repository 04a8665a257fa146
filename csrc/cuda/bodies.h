// The bodies of the CUDA kernels, templates over the block of threads (cta.h). Free of torch.
// Formulas and block rule are the CPU's; what differs is who computes which element.
#pragma once

#include "cuda/cta.h"
#include "kernels/block_rule.h"
#include "kernels/schedule.h"
#include "plan/chunk_table.h"

namespace torchopt_ext {

// Tables in device memory; grid.x is the number of chunks.
struct SumOfSquaresArgs {
  const TensorWork* tensors;
  const Chunk* chunks;
  int64_t* accumulator;  // of an ExactAccumulator
};

// A param group's arguments; a learning rate on the device replaces the number.
struct GroupArgs {
  AdamHyper hyper;
  const void* lr;
  DType lr_dtype;
};

struct AdamArgs {
  const TensorWork* tensors;
  const Chunk* chunks;
  const GroupArgs* groups;
  const Control* control;
  int64_t tensor_count;
};

namespace {

TORCHOPT_HD inline float load_float(const void* memory, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return widen(static_cast<const BFloat16*>(memory)[i]);
    case DType::kFloat16:
      return widen(static_cast<const Float16*>(memory)[i]);
    default:
      return static_cast<const float*>(memory)[i];
  }
}

TORCHOPT_HD inline void store_float(void* memory, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(memory)[i] = narrow<BFloat16>(x);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(memory)[i] = narrow<Float16>(x);
      break;
    default:
      static_cast<float*>(memory)[i] = x;
  }
}

TORCHOPT_HD inline double load_square(const void* memory, DType dtype, int64_t i) {
  return dtype == DType::kFloat64 ? square(static_cast<const double*>(memory)[i])
                                  : square(load_float(memory, dtype, i));
}

// A warp's sum over one block: thread t owns lanes 2t and 2t + 1. The result is thread 0's.
template <class Warp>
TORCHOPT_HD inline double warp_sum_of_squares(const Warp& warp, const void* memory, DType dtype,
                                              const BlockRange& range) {
  using L = ScalarLane<double>;
  typename Warp::Doubles even;
  typename Warp::Doubles odd;
  warp.each([&](int thread) {
    double a = 0.0;
    double b = 0.0;
    for (int64_t i = 2 * thread; i < range.length; i += kBlockLanes) {
      a = L::add(a, load_square(memory, dtype, range.begin + i));
      if (i + 1 < range.length) {
        b = L::add(b, load_square(memory, dtype, range.begin + i + 1));
      }
    }
    even[thread] = a;
    odd[thread] = b;
  });
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    warp.fold(even, distance);
    warp.fold(odd, distance);
  }
  return L::add(even[0], odd[0]);
}

// Pass A. One block of threads a chunk: it sums into shared memory and then into the accumulator,
// by integer atomics, whose order does not show.
template <class Cta>
TORCHOPT_HD inline void sum_of_squares_body(Cta& cta, const SumOfSquaresArgs& args) {
  const Chunk chunk = args.chunks[cta.block];
  const TensorWork work = args.tensors[chunk.tensor];
  if (work.grad == nullptr) {
    return;
  }
  ExactAccumulator& shared = cta.shared().accumulator;
  auto* slots = reinterpret_cast<int64_t*>(&shared);
  const auto add = [&](double x) {
    accumulator_digits(x, [&](int index, int64_t change) { Cta::add(slots + index, change); });
  };
  cta.each([&](int thread) {
    for (int k = thread; k < ExactAccumulator::kSize; k += cta.threads) {
      slots[k] = 0;
    }
  });
  if (work.row_length < kShortRow) {
    cta.each([&](int thread) {
      for (int64_t i = chunk.begin + thread; i < chunk.end; i += cta.threads) {
        add(load_square(work.grad, work.param_dtype, i));
      }
    });
  } else {
    const int64_t blocks = block_count(work.row_length, chunk.begin, chunk.end);
    cta.each_warp([&](int warp_index, const auto& warp) {
      for (int64_t b = warp_index; b < blocks; b += cta.threads / kWarpThreads) {
        const double sum =
            warp_sum_of_squares(warp, work.grad, work.param_dtype,
                                block_range(work.row_length, chunk.begin, chunk.end, b));
        warp.leader([&] { add(sum); });
      }
    });
  }
  cta.each([&](int thread) {
    if (thread == 0) {
      accumulator_normalize(shared);
    }
  });
  cta.each([&](int thread) {
    for (int k = thread; k < ExactAccumulator::kSize; k += cta.threads) {
      if (slots[k] != 0) {
        Cta::add(args.accumulator + k, slots[k]);
      }
    }
  });
}

// Counts the step of every tensor that takes part: thread i of the grid has tensor i. A kernel of
// its own, before pass B, whose blocks all read the count.
TORCHOPT_HD inline void advance_steps_body(int64_t i, const AdamArgs& args) {
  if (i < args.tensor_count && args.control->skip == 0.0 && args.tensors[i].grad != nullptr) {
    *args.tensors[i].step = ScalarLane<float>::add(*args.tensors[i].step, 1.0f);
  }
}

// Pass B. One block of threads a chunk.
template <class Cta>
TORCHOPT_HD inline void adam_body(Cta& cta, const AdamArgs& args) {
  const Chunk chunk = args.chunks[cta.block];
  const TensorWork work = args.tensors[chunk.tensor];
  if (work.grad == nullptr || args.control->skip != 0.0) {
    return;
  }
  CtaShared& shared = cta.shared();
  cta.each([&](int thread) {
    if (thread != 0) {
      return;
    }
    const GroupArgs& group = args.groups[work.group];
    AdamHyper hyper = group.hyper;
    if (group.lr != nullptr) {
      hyper.lr = group.lr_dtype == DType::kFloat64
                     ? *static_cast<const double*>(group.lr)
                     : static_cast<double>(*static_cast<const float*>(group.lr));
    }
    const auto step = static_cast<int64_t>(*work.step);
    const double factor = args.control->grad_factor;
    shared.as_float = adam_scalars<float>(hyper, step, factor);
    shared.as_double = adam_scalars<double>(hyper, step, factor);
  });
  cta.each([&](int thread) {
    for (int64_t i = chunk.begin + thread; i < chunk.end; i += cta.threads) {
      if (work.param_dtype == DType::kFloat64) {
        const auto at = [i](void* memory) { return static_cast<double*>(memory) + i; };
        adam_update<ScalarLane<double>>(
            shared.as_double, at(work.param), static_cast<const double*>(work.grad) + i,
            at(work.exp_avg), at(work.exp_avg_sq),
            work.max_exp_avg_sq != nullptr ? at(work.max_exp_avg_sq) : nullptr);
        continue;
      }
      const bool amsgrad = work.max_exp_avg_sq != nullptr;
      float p = load_float(work.param, work.param_dtype, i);
      const float g = load_float(work.grad, work.param_dtype, i);
      float m = load_float(work.exp_avg, work.state_dtype, i);
      float v = load_float(work.exp_avg_sq, work.state_dtype, i);
      float vmax = amsgrad ? load_float(work.max_exp_avg_sq, work.state_dtype, i) : 0.0f;
      adam_update<ScalarLane<float>>(shared.as_float, &p, &g, &m, &v, amsgrad ? &vmax : nullptr);
      store_float(work.param, work.param_dtype, i, p);
      store_float(work.exp_avg, work.state_dtype, i, m);
      store_float(work.exp_avg_sq, work.state_dtype, i, v);
      if (amsgrad) {
        store_float(work.max_exp_avg_sq, work.state_dtype, i, vmax);
      }
    }
  });
}

}  // namespace
}  // namespace torchopt_ext

#include "cuda/traced.h"

namespace torchopt_ext {

template void launch(const SumTracesKernel&, int64_t, CUstream_st*);

void launch_traced(Kind kind, const UpdateArgs& args, const TraceArgs& traces, int64_t chunk_count,
                   CUstream_st* stream) {
  with_kind(kind, [&](auto constant) {
    launch(TracedKernel<static_cast<int>(constant())>{{}, args, traces}, chunk_count, stream);
  });
}

}  // namespace torchopt_ext

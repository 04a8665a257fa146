#include "cuda/pass_b.h"

namespace torchopt_ext {

template void launch(const PrepareKernel<kMostTensors>&, int64_t, CUstream_st*);
template void launch(const PrepareKernel<kSomeTensors>&, int64_t, CUstream_st*);
template void launch(const PrepareKernel<kFewTensors>&, int64_t, CUstream_st*);

void launch_update(Kind kind, const UpdateArgs& args, int64_t chunk_count, CUstream_st* stream) {
  with_kind(kind, [&](auto constant) {
    launch(UpdateKernel<static_cast<int>(constant())>{{}, args}, chunk_count, stream);
  });
}

}  // namespace torchopt_ext

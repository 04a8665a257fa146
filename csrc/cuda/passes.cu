// The kernels of every pass except pass B (pass_b.cu, traced.cu).
#include "cuda/average.h"
#include "cuda/control.h"
#include "cuda/copy.h"
#include "cuda/digest.h"
#include "cuda/norm.h"

namespace torchopt_ext {

template void launch(const NormKernel<kMostTensors>&, int64_t, CUstream_st*);
template void launch(const NormKernel<kSomeTensors>&, int64_t, CUstream_st*);
template void launch(const NormKernel<kFewTensors>&, int64_t, CUstream_st*);
template void launch(const NormalizeKernel&, int64_t, CUstream_st*);
template void launch(const TotalKernel&, int64_t, CUstream_st*);
template void launch(const ControlUpdateKernel&, int64_t, CUstream_st*);
template void launch(const LossScaleUpdateKernel&, int64_t, CUstream_st*);
template void launch(const LrFactorKernel&, int64_t, CUstream_st*);
template void launch(const AverageKernel&, int64_t, CUstream_st*);
template void launch(const CopyKernel&, int64_t, CUstream_st*);
template void launch(const DigestKernel&, int64_t, CUstream_st*);

}  // namespace torchopt_ext

// The CUDA back end of a build without CUDA.
#include "work/passes.h"

const torchopt_ext::Passes& torchopt_ext::cuda::passes() {
  TORCH_CHECK(false, "torchopt_ext was built without support for cuda tensors");
}

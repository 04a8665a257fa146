// digest_: adds the digest of each tensor to its element of `digests` (int64). `arrays` has eight
// numbers for each tensor: its role, the length of the parameter's rows if the parameter has 8-bit
// moments or else 0, and the place as in TensorWork, parameter number first. Lengths and places
// count elements of the parameter.
#include "kernels/digest.h"

#include "ops/operator.h"
#include "plan/tensor_checks.h"
#include "plan/tensor_fields.h"
#include "work/passes.h"

namespace torchopt_ext {
namespace {

constexpr size_t kNumbers = 8;

// Returns the type that stands for all types of its size.
DType type_of_size(size_t bytes, const at::Tensor& tensor, const Label& what) {
  for (const DType type : {DType::kInt8, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (static_cast<size_t>(element_size(type)) == bytes) {
      return type;
    }
  }
  TORCH_CHECK(false, what, " has dtype ", dtype_name(tensor.scalar_type()),
              ", expected elements of 1, 2, 4 or 8 bytes");
}

void digest_(at::TensorList tensors, at::IntArrayRef arrays, const at::Tensor& digests) {
  const size_t n = tensors.size();
  TORCH_CHECK(arrays.size() == kNumbers * n, "got ", arrays.size(), " numbers for ", n,
              " tensors, expected ", kNumbers, " for each");
  TORCH_CHECK(digests.scalar_type() == at::kLong && digests.dim() == 1 && digests.is_contiguous() &&
                  static_cast<size_t>(digests.numel()) == n,
              "digests is ", dtype_name(digests.scalar_type()), " of shape ", digests.sizes(),
              ", expected a contiguous int64 tensor of ", n, " elements");
  WorkList work;
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < n; ++i) {
    const Label what{"tensor", i};
    check_memory(tensors[i], what);
    TORCH_CHECK(tensors[i].device() == digests.device(), what, " is on ", tensors[i].device(),
                ", expected ", digests.device(), " as the digests");
    kept.push_back(tensors[i].is_non_overlapping_and_dense() ? tensors[i]
                                                             : tensors[i].contiguous());
    const at::Tensor& tensor = kept.back();
    const int64_t reals = reals_per_element(tensor);
    const int64_t* const number = arrays.data() + kNumbers * i;
    TORCH_CHECK_VALUE(number[0] >= 0 && number[0] < kStep, "role of ", what, " is ", number[0],
                      ", expected 0 to ", int{kStep} - 1);
    const bool is_scale = number[0] >= kFirstScaleRole;
    TORCH_CHECK_VALUE(!is_scale || (number[1] > 0 && tensor.itemsize() == 4), what,
                      " has a scale's role, expected 4-byte elements and a row length above 0");
    DigestArray array{};
    array.memory[kParam] = const_cast<void*>(tensor.const_data_ptr());  // a digest only reads it
    array.numel = reals * tensor.numel();
    array.layout.param = type_of_size(tensor.itemsize() / static_cast<size_t>(reals), tensor, what);
    array.group = static_cast<int32_t>(number[0]);
    array.row_length = reals * number[1];
    array.index = static_cast<uint32_t>(number[2]);
    array.first_element = reals * number[3];
    array.run = reals * number[4];
    array.stride = reals * number[5];
    array.rows = number[6];
    array.gap = reals * number[7];
    work.tensors.push_back(array);
  }
  add_plain_chunks(work.tensors, [](const TensorWork&) { return kDigestChunk; }, work.chunks);
  work.cumulative = cumulative_bytes(work.tensors, work.chunks);
  passes_on(digests.device()).digest(work, digests);
  bump_version(digests);
}

const Operator kDigest("digest_", "(Tensor[] tensors, int[] arrays, Tensor(a!) digests) -> ()",
                       digest_);

}  // namespace
}  // namespace torchopt_ext

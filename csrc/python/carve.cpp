#include "python/carve.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "plan/tensor_checks.h"
#include "python/param_lists.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// Rejects subclasses with sizes or memory of their own, and tensors that are not dense.
void check_like(const at::Tensor& tensor, size_t i) {
  TORCH_CHECK(
      !tensor.key_set().has(c10::DispatchKey::Python), Label{"like", i},
      " is of a subclass that has sizes or memory of its own; pass the tensor that it wraps");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), Label{"like", i}, " is ",
              tensor.scalar_type(), " of layout ", tensor.layout(),
              ", expected a dense (strided) tensor");
  check_dense(tensor, Label{"like", i});
}

void check_dtype(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!dtype || !c10::isQIntType(*dtype), "dtype is ", *dtype,
                   ", expected one that is not quantized");
}

int64_t bytes_of(const at::Tensor& like, at::ScalarType dtype) {
  return like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t aligned(int64_t bytes) {
  return (bytes + kCarveAlignment - 1) / kCarveAlignment * kCarveAlignment;
}

// Memory and the storage that owns it.
struct Block {
  char* memory = nullptr;
  c10::Storage storage;
  at::Device device;
};

Block block_of(const at::Tensor& block, int64_t bytes) {
  TORCH_CHECK(block.layout() == at::kStrided && block.scalar_type() == at::kByte &&
                  block.is_contiguous() && !block.is_meta() &&
                  !block.key_set().has(c10::DispatchKey::Python),
              "block is ", block.scalar_type(), block.sizes(), " of layout ", block.layout(),
              " on ", block.device(), ", expected a contiguous uint8 tensor with memory");
  TORCH_CHECK(block.numel() >= bytes, "block has ", block.numel(), " bytes, expected ", bytes);
  if (bytes == 0) {
    return {nullptr, {}, block.device()};
  }
  auto* memory = static_cast<char*>(block.mutable_data_ptr());
  const auto misaligned =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory)) % kBlockAlignment;
  TORCH_CHECK(misaligned == 0, "block starts ", misaligned, " bytes after a multiple of ",
              kBlockAlignment, ", expected one that starts at a multiple");
  // Resizing the block would free memory that carved tensors use.
  block.storage().unsafeGetStorageImpl()->set_resizable(false);
  return {memory, block.storage(), block.device()};
}

Block allocate(at::Device device, int64_t bytes) {
  TORCH_CHECK(!device.is_meta(), "like is on the meta device, which has no memory: pass a block");
  const c10::DeviceGuard guard(device);
  at::DataPtr memory = c10::GetAllocator(device.type())->allocate(static_cast<size_t>(bytes));
  auto* begin = static_cast<char*>(memory.get());
  return {begin,
          c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), nullptr,
                       /*resizable=*/false),
          device};
}

void release_block(void* block) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(block)).reset();
}

at::Tensor tensor_in(const Block& block, int64_t offset, const at::Tensor& like,
                     at::ScalarType dtype) {
  const int64_t bytes = bytes_of(like, dtype);
  at::DataPtr memory(nullptr, block.device);
  if (bytes > 0) {
    memory =
        at::DataPtr(block.memory + offset, c10::Storage(block.storage).unsafeReleaseStorageImpl(),
                    release_block, block.device);
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), nullptr,
                       /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, at::kStrided, block.device)),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

}  // namespace

int64_t carved_bytes(const py::list& like, std::optional<at::ScalarType> dtype) {
  check_dtype(dtype);
  int64_t bytes = 0;
  for (size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    check_like(tensor, i);
    constexpr int64_t kMost = int64_t{1} << 59;  // sums do not overflow
    TORCH_CHECK(tensor.numel() < kMost / 16 && bytes < kMost, Label{"like", i}, " has ",
                tensor.numel(), " elements: no memory holds so many");
    bytes += aligned(bytes_of(tensor, dtype.value_or(tensor.scalar_type())));
  }
  return bytes;
}

py::list carve(const py::list& like, std::optional<at::ScalarType> dtype,
               const std::optional<at::Tensor>& block, bool one_version) {
  const int64_t bytes = carved_bytes(like, dtype);
  at::Device device = at::kCPU;
  for (size_t i = 0; i < like.size() && !block; ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    device = i == 0 ? tensor.device() : device;
    TORCH_CHECK(tensor.device() == device, Label{"like", i}, " is on ", tensor.device(),
                ", expected ", device, " as like 0");
  }
  const Block memory = block ? block_of(*block, bytes) : allocate(device, bytes);
  py::list carved(like.size());
  int64_t offset = 0;
  c10::VariableVersion version;
  for (size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    const at::ScalarType type = dtype.value_or(tensor.scalar_type());
    const at::Tensor made = tensor_in(memory, offset, tensor, type);
    if (one_version && i == 0) {
      version = made.unsafeGetTensorImpl()->version_counter();
    } else if (one_version) {
      made.unsafeGetTensorImpl()->set_version_counter(version);
    }
    PyObject* object = THPVariable_Wrap(made);
    if (object == nullptr) {
      throw py::error_already_set();
    }
    PyList_SET_ITEM(carved.ptr(), static_cast<Py_ssize_t>(i), object);
    offset += aligned(bytes_of(tensor, type));
  }
  return carved;
}

}  // namespace torchopt_ext

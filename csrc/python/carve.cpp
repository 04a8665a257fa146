// Makes many tensors in one block of memory without the dispatcher: buffers with the parameters'
// shapes take a tenth of the time, and the block moves between devices in one copy.
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "plan/tensor_checks.h"
#include "python/bindings.h"
#include "work/host_memory.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// A GPU's cache line: a step over arrays that begin within a line takes a tenth longer.
constexpr int64_t kCarveAlignment = 128;

// Rejects subclasses with sizes or memory of their own, and tensors that are not dense.
void check_like(const at::Tensor& tensor, size_t i) {
  TORCH_CHECK(
      !tensor.key_set().has(c10::DispatchKey::Python), Label{"like", i},
      " is of a subclass that has sizes or memory of its own; pass the tensor that it wraps");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), Label{"like", i}, " is ",
              dtype_name(tensor.scalar_type()), " of layout ", tensor.layout(),
              ", expected a dense (strided) tensor");
  check_dense(tensor, Label{"like", i});
}

int64_t bytes_of(const at::Tensor& like, at::ScalarType dtype) {
  return like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t aligned(int64_t bytes) {
  return (bytes + kCarveAlignment - 1) / kCarveAlignment * kCarveAlignment;
}

c10::Storage allocate(at::Device device, int64_t bytes, std::optional<at::Device> stepped_on) {
  TORCH_CHECK(!device.is_meta(), "like is on the meta device, which has no memory: pass a device");
  if (stepped_on) {
    const py::gil_scoped_release others_may_run;  // a gigabyte takes a tenth of a second
    // One byte more, so that empty tensors at the end are in the block.
    return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
            allocate_host_memory(bytes + 1, *stepped_on),
            /*allocator=*/nullptr, /*resizable=*/false};
  }
  const c10::DeviceGuard guard(device);
  return {c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(device.type()),
          /*resizable=*/false};
}

void release(void* storage) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(storage)).reset();
}

// Returns a tensor at an address in the memory of `block`, which it keeps.
at::Tensor tensor_in(const c10::Storage& block, void* memory, const at::Tensor& like,
                     at::ScalarType dtype) {
  at::DataPtr data(memory, c10::Storage(block).unsafeReleaseStorageImpl(), release, block.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), bytes_of(like, dtype), std::move(data)),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, at::kStrided, block.device())),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

// Returns uninitialized tensors with the sizes, strides and (without `dtype`) dtypes of `like`, one
// after the other at multiples of kCarveAlignment bytes of one allocation on `device`, or else on
// the device of `like`. Each tensor has its own storage, which spans only its bytes and keeps the
// allocation. With `one_version` all share a version counter, as views of one tensor would, so that
// a change of all tensors is counted once. With `stepped_on` they are zeros in the host's memory
// that kernels of that device can access (work/host_memory.h).
py::list carve(const py::list& given, std::optional<at::ScalarType> dtype,
               std::optional<at::Device> device, bool one_version,
               std::optional<at::Device> stepped_on) {
  // Other threads may change the caller's list.
  const auto like = py::reinterpret_steal<py::list>(
      PyList_GetSlice(given.ptr(), 0, static_cast<Py_ssize_t>(given.size())));
  TORCH_CHECK_TYPE(!dtype || !c10::isQIntType(*dtype), "dtype is ", dtype_name(*dtype),
                   ", expected one that is not quantized");
  device = stepped_on ? at::kCPU : device;
  const bool as_like = !device;
  int64_t bytes = 0;
  for (size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    check_like(tensor, i);
    device = device.value_or(tensor.device());
    TORCH_CHECK(!as_like || tensor.device() == *device, Label{"like", i}, " is on ",
                tensor.device(), ", expected ", *device, " as like 0");
    constexpr int64_t kMost = int64_t{1} << 59;  // sums do not overflow
    TORCH_CHECK(tensor.numel() < kMost / 16 && bytes < kMost, Label{"like", i}, " has ",
                tensor.numel(), " elements: no memory holds so many");
    bytes += aligned(bytes_of(tensor, dtype.value_or(tensor.scalar_type())));
  }
  const c10::Storage storage = allocate(device.value_or(at::kCPU), bytes, stepped_on);
  auto* memory = static_cast<char*>(storage.mutable_data());
  py::list carved(like.size());
  c10::VariableVersion version;
  for (size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& tensor = tensor_at(like, i);
    const at::ScalarType type = dtype.value_or(tensor.scalar_type());
    const at::Tensor piece = tensor_in(storage, memory, tensor, type);
    if (one_version && i == 0) {
      version = piece.unsafeGetTensorImpl()->version_counter();
    } else if (one_version) {
      piece.unsafeGetTensorImpl()->set_version_counter(version);
    }
    PyObject* object = THPVariable_Wrap(piece);
    if (object == nullptr) {
      throw py::error_already_set();
    }
    PyList_SET_ITEM(carved.ptr(), static_cast<Py_ssize_t>(i), object);
    memory += aligned(bytes_of(tensor, type));
  }
  return carved;
}

}  // namespace

void add_carve(py::module_& m) {
  m.def("carve", carve, py::arg("like"), py::arg("dtype") = py::none(),
        py::arg("device") = py::none(), py::kw_only(), py::arg("one_version") = false,
        py::arg("stepped_on") = py::none());
  m.def("is_host_memory", [](const at::Tensor& tensor) {
    return is_host_memory(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  });
}

}  // namespace torchopt_ext

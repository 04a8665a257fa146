// Many tensors in one block of memory, made without going through the dispatcher: buffers with the
// parameters' shapes take a tenth of the time, and the block moves between devices in one copy.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchopt_ext {

// A GPU's lines of 128 bytes: a step over arrays that begin within one takes a tenth longer.
inline constexpr int64_t kCarveAlignment = 128;
inline constexpr int64_t kBlockAlignment = 64;  // of a caller's, as torch's CPU allocator gives it

// Uninitialised tensors with the sizes and strides of each of `like` and a given dtype, or its own,
// one after the other at multiples of kCarveAlignment bytes from the start of `block`, a contiguous
// uint8 tensor; or, without one, of an allocation on the device of `like`. Each has a storage of
// its own, which is its bytes and no more and keeps the block's memory. With `one_version` they
// share a version counter, as views of the block would, and a change of all is counted once.
pybind11::list carve(const pybind11::list& like, std::optional<at::ScalarType> dtype,
                     const std::optional<at::Tensor>& block, bool one_version);

// What they take of a block; that of two lists is their sum.
int64_t carved_bytes(const pybind11::list& like, std::optional<at::ScalarType> dtype);

}  // namespace torchopt_ext

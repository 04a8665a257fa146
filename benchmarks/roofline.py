"""Plain loops over the same tensors as a step: what memory allows (roofline.cpp)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from group import Case
from native import shared_library
from rows import LOOP
from torch import Tensor

# Bytes per parameter of each loop: its streams, those that are rewritten counted twice.
BYTES = {
    "read_fp32": 4,
    "read_bf16": 2,
    "update_fp32": 28,
    "update_bf16_master": 28,
    "update_bf16_remainder": 26,
    "update_bf16": 14,
}


@functools.cache
def library() -> ctypes.CDLL:
    with shared_library("roofline.cpp") as path:
        return ctypes.CDLL(str(path))  # shares torch's OpenMP threads: the same libgomp.so.1


def loop_case(name: str, *streams: Sequence[Tensor]) -> Case:
    """A case that runs the loop ``name`` over lists of tensors, with torch's number of threads."""
    function = getattr(library(), name)
    function.restype = None
    kept = [[tensor.detach() for tensor in stream] for stream in streams]
    count = len(kept[0])
    pointers = [(ctypes.c_void_p * count)(*[t.data_ptr() for t in stream]) for stream in kept]
    table = (ctypes.c_void_p * len(kept))(*[ctypes.addressof(array) for array in pointers])
    sizes = (ctypes.c_int64 * count)(*[tensor.numel() for tensor in kept[0]])
    tensors, threads = ctypes.c_int64(count), ctypes.c_int(torch.get_num_threads())

    def call(_alive: object = (kept, pointers)) -> None:
        function(table, sizes, tensors, threads)

    return Case(LOOP, name, call, BYTES[name])

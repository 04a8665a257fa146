"""Plain loops over a step's tensors show what memory allows (roofline.cpp)."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import LOOP, Case
from torch import Tensor

# Bytes per parameter of each loop: its streams. Streams that it rewrites count twice.
BYTES = {
    "read_fp32": 4,
    "read_bf16": 2,
    "update_fp32": 28,
    "update_fp32_1": 20,
    "update_fp32_0": 12,
    "direction_fp32": 16,
    "update_bf16_master": 28,
    "update_bf16_remainder": 26,
    "update_bf16": 14,
    "update_bf16_int8": 12,  # without the scales of 0.25 bytes
}
OBJECTS = "read_objects"


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles the loops for this machine's processor.

    Raises:
        CalledProcessError: the compiler (``CXX``, otherwise g++) fails; it says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roofline.so"
        flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        source = str(Path(__file__).with_suffix(".cpp"))
        subprocess.run([os.environ.get("CXX", "g++"), *flags, "-o", str(path), source], check=True)
        return ctypes.CDLL(str(path))  # uses torch's OpenMP threads: the same libgomp.so.1


def loop_case(name: str, *streams: Sequence[Tensor]) -> Case:
    """Returns a case that runs the loop ``name`` over tensors, with torch's number of threads."""
    kept = [[tensor.detach() for tensor in stream] for stream in streams]
    addresses = [[tensor.data_ptr() for tensor in stream] for stream in kept]
    call = loop_call(name, addresses, [tensor.numel() for tensor in kept[0]], kept)
    return Case(LOOP, name, call, BYTES[name])


def objects_case(*streams: Sequence[Tensor]) -> Case:
    """Returns a case that reads the tensors' own fields instead of their elements."""
    addresses = []
    for stream in streams:
        addresses.append([tensor._cdata for tensor in stream])
        addresses.append([tensor.untyped_storage()._cdata for tensor in stream])
    return Case(LOOP, OBJECTS, loop_call(OBJECTS, addresses, [1] * len(streams[0]), streams), None)


def in_turn(*loops: Case) -> Case:
    """Returns a case that runs the loops one after the other, as a step runs its passes.

    The caches then keep the same data from one loop to the next. A loop timed separately would find
    its own last streams in the caches.
    """

    def call() -> None:
        for loop in loops:
            loop.call()

    moved = [loop.bytes_per_parameter for loop in loops if loop.bytes_per_parameter is not None]
    return Case(LOOP, " + ".join(loop.operation for loop in loops), call, sum(moved))


def loop_call(
    name: str, addresses: Sequence[Sequence[int]], sizes: Sequence[int], alive: object
) -> Callable[[], None]:
    """Returns a call of the loop ``name`` on addresses of memory that ``alive`` keeps alive."""
    function = getattr(library(), name)
    function.restype = None
    count = len(sizes)
    pointers = [(ctypes.c_void_p * count)(*stream) for stream in addresses]
    table = (ctypes.c_void_p * len(pointers))(*[ctypes.addressof(array) for array in pointers])
    lengths = (ctypes.c_int64 * count)(*sizes)
    tensors, threads = ctypes.c_int64(count), ctypes.c_int(torch.get_num_threads())

    def call(_alive: object = (alive, pointers)) -> None:
        function(table, lengths, tensors, threads)

    return call

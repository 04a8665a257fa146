"""Measures how much memory a step allocates: allocations.cpp counts every malloc of the process.

This needs a separate process, because the counting malloc must be preloaded at its start.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import torch
from cases import CLIP, FUSED, OURS, SCALER, STEP, fp32_cases, gradients_of
from native import shared_library
from rows import Row

ELEMENTS = 1000  # of each tensor


def measure_allocations(tensors: tuple[int, ...], threads: int) -> list[Row]:
    """Returns the allocations of one step, ours and torch fused, for each number of tensors."""
    with shared_library("allocations.cpp") as library:
        command = [sys.executable, __file__, str(threads), *map(str, tensors)]
        environment = os.environ | {"LD_PRELOAD": str(library)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def count_in_this_process(tensors: int) -> list[Row]:
    preloaded = ctypes.CDLL(None)
    count, peak = ctypes.c_int64(), ctypes.c_int64()
    stop_arguments = ctypes.byref(count), ctypes.byref(peak)
    gradients = gradients_of([(ELEMENTS,)] * tensors, torch.float32, "cpu")
    rows = []
    for implementation in (OURS, FUSED):
        operations = (STEP, CLIP, SCALER)
        for case in fp32_cases(implementation, gradients, "cpu", operations, loops=False):
            for _ in range(3):  # the first call creates state and plans
                case.call()
            preloaded.allocations_start()
            case.call()
            preloaded.allocations_stop(*stop_arguments)
            rows.append(
                {
                    "implementation": case.implementation,
                    "operation": case.operation,
                    "tensors": tensors,
                    "allocations": count.value,
                    "peak_bytes": peak.value,
                }
            )
    return rows


def main() -> None:
    threads, *tensors = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    print(json.dumps([row for count in tensors for row in count_in_this_process(count)]))


if __name__ == "__main__":
    main()

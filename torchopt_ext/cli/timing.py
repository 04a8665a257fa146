"""Times calls in turn and describes the machine, for the command bench and for benchmarks/."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import torchopt_ext
from torchopt_ext import _C, _build_info
from torchopt_ext.cli.info import processor

Call = Callable[[], Any]
T = TypeVar("T")


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Returns versions, hardware, date and command."""
    about: dict[str, Any] = {
        "torchopt_ext": torchopt_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _build_info.CXX_COMPILER,
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torchopt_ext_kernels": _C.cpu_kernels(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
    if torch.device(device).type != "cuda":
        return about | {"device": about["cpu"]}
    properties = torch.cuda.get_device_properties(device)
    return about | {
        "built for": f"CUDA {_build_info.CUDA_VERSION}, {_build_info.CUDA_ARCHITECTURES}",
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def seconds_of(call: Call, device: torch.device) -> float:
    """Returns the seconds of a call; on a GPU including the work that the call started."""
    on_gpu = device.type == "cuda"
    wait: Call = functools.partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def in_turn(calls: Sequence[Call], clock: Callable[[Call], T]) -> Iterator[list[T]]:
    """Yields the samples of one round after another, without end, in the order of ``calls``.

    A change of the machine's speed affects all calls: rounds go forward and backward in turn, and
    begin with another call every two rounds. Each must have been called once before.
    """
    count = len(calls)
    for index in itertools.count():
        order = [(index // 2 + i) % count for i in range(count)]
        samples = {i: clock(calls[i]) for i in (order if index % 2 == 0 else order[::-1])}
        yield [samples[i] for i in range(count)]


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns the median of ratios within rounds. The machine's speed affects both halves."""
    return statistics.median(n / d for n, d in zip(numerator, denominator, strict=True))


def quartiles(samples: Sequence[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile."""
    return statistics.quantiles([*samples] * (2 if len(samples) == 1 else 1), method="inclusive")

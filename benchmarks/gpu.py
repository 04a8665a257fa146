"""The same cases on a GPU: times by CUDA events, kernel launches, synchronisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from adapt_cases import build_adapters
from bf16_cases import build_masters, build_plain
from cases import CLIP, FUSED, OURS, SCALER, STEP, build_fp32, fp32_cases, gradients_of
from measure import measure
from rows import Row
from shapes import BILLION, GPT2, SMALL, Shapes
from timing import Flush, cuda_milliseconds
from torch.profiler import ProfilerActivity, profile

COPY_PERCENT = 90.0
COPY_BYTES = 1 << 32


def copy_bandwidth(bytes_: int) -> float:
    """Gigabytes per second, read and written, of the best of some copies within the device."""
    source = torch.zeros(bytes_, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    return 2 * bytes_ / min(cuda_milliseconds(copy) for _ in range(10)) / 1e6


def kernel_launches_and_waits(call: Callable[[], object]) -> tuple[int, int]:
    """CUDA calls of one step: launches, and synchronisations of the host with the device."""
    for _ in range(2):  # the first starts the profiler
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            call()
    calls = {event.key: event.count for event in profiled.key_averages()}
    # The profiler itself ends with a cudaDeviceSynchronize.
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    return launches, sum(calls.get(name, 0) for name in waits)


def runs_without_waiting(call: Callable[[], object]) -> bool:
    """Whether a step runs where torch forbids its own operators to synchronise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def count_calls(shapes: Shapes) -> list[Row]:
    gradients = gradients_of(shapes, torch.float32, "cuda")
    rows = []
    for implementation in (OURS, FUSED):
        for case in fp32_cases(implementation, gradients, "cuda", (STEP, CLIP, SCALER)):
            case.call()  # creates state and plan
            launches, waits = kernel_launches_and_waits(case.call)
            rows.append(
                {
                    "implementation": implementation,
                    "operation": case.operation,
                    "tensors": len(shapes),
                    "kernel_launches": launches,
                    "synchronisations": waits,
                    "allowed_without_synchronisation": runs_without_waiting(case.call),
                }
            )
    return rows


def target_lines(rows: list[Row], calls: list[Row], copy: float) -> list[str]:
    lines = []
    for row in rows:
        large = row["set"].startswith((BILLION, GPT2))
        if large and row["implementation"].startswith(OURS):
            percent = 100 * row["gigabytes_per_second"] / copy
            met = "met    " if percent >= COPY_PERCENT else "NOT MET"
            what = f"{row['set']}, {row['operation']}, {row['implementation']}"
            lines.append(f"{met}  {what}, at least {COPY_PERCENT:g} % of a copy: {percent:.1f} %")
    for row in calls:
        if row["implementation"] == OURS:
            free = row["synchronisations"] == 0 and row["allowed_without_synchronisation"]
            what = f"{row['operation']}, no synchronisation with the host"
            lines.append(f"{'met    ' if free else 'NOT MET'}  {what}: {row['synchronisations']}")
    return lines


def measure_all(
    sets: dict[str, Shapes], rounds: int, flush: Callable[[], Flush], quick: bool
) -> tuple[list[Row], dict[str, list[str]], dict[str, Any]]:
    """Rows, sections of the text and further content of the JSON.

    The roofline is the time a copy within the device takes for as many bytes as the step.
    """
    copy = copy_bandwidth(COPY_BYTES >> (10 if quick else 0))
    fp32 = partial(build_fp32, device="cuda", implementations=(OURS, FUSED))
    builds = [
        *[partial(fp32, name, sets[name]) for name in (BILLION, GPT2)],
        partial(fp32, SMALL, sets[SMALL], flushed=True),
        *[
            partial(build, f"{name}, {what}", sets[name], device="cuda")
            for name in (BILLION, GPT2)
            for build, what in ((build_masters, "bf16"), (build_plain, "bf16 throughout"))
        ],
        *[
            partial(build_adapters, f"{name}, FSDPadaptOptimizer", sets[name], device="cuda")
            for name in (GPT2, SMALL)
        ],
    ]
    rows, _ = measure(builds, rounds, cuda_milliseconds, flush)
    for row in rows:
        if row["implementation"].startswith(OURS):
            moved = row["bytes_per_parameter"] * row["parameters"]
            ratio = copy / row["gigabytes_per_second"]
            row["roofline"] = {"milliseconds": moved / copy / 1e6, "ratio": ratio}
    calls = count_calls(sets[GPT2])
    sections = {
        "Bandwidth of a copy": [f"{copy:.0f} GB/s, read and written"],
        f"CUDA calls of one step, {GPT2}": [
            ", ".join(f"{key}: {value}" for key, value in row.items()) for row in calls
        ],
        "Targets": [] if quick else target_lines(rows, calls, copy),
    }
    return rows, sections, {"copy_gigabytes_per_second": copy, "cuda_calls": calls}

"""Measures one section of gpu_report.py. Needs only torch.

python benchmarks/gpu_sections.py SECTION --out FILE [--device cpu --quick]

Writes every row as soon as it is measured, so that a stopped section keeps the earlier rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from bf16_cases import BYTES as BF16_BYTES
from bf16_cases import MASTERS, PLAIN, PREALLOCATED, REMAINDER, TorchMasters, our_cases
from cases import (
    BYTES,
    CLIP,
    FUSED,
    MAX_NORM,
    OURS,
    SCALER,
    STEP,
    clip_and_step,
    fp32_cases,
    gradients_of,
    params_with,
)
from gpu_offload import offload
from harness import Call, Case, Row, wall_milliseconds
from mixed_precision import build_adapters
from peers import GPU, SETTINGS
from shapes import BILLION, GPT2, QUICK_SETS, SETS, SMALL, Shapes, parameters

from torchopt_ext import FusedAdamW, ops

Rows = Iterator[Row]
T = TypeVar("T")

COPY, NORM, UPDATE = "copy", "pass A", "pass B"
COPY_BYTES = 1 << 32
BF16 = "bf16"
GRAPH = "as a CUDA graph"
FLUSHED = "caches flushed"
SECONDS, SAMPLES = 3.0, 20  # at most, for one case
# Longer than any call here takes the host: at least 30 ms at the clock rates of current GPUs.
SLEEP_CYCLES = 60_000_000


def device_milliseconds(call: Call) -> float:
    """Returns the device's time. The device sleeps first, so that it never waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_and_wall_milliseconds(call: Call) -> tuple[float, float]:
    """Returns the time until ``call`` returns, and the time from idle device to idle device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    wait()
    return (returned - start) / 1e6, (time.perf_counter_ns() - start) / 1e6


def samples_of(clock: Callable[[Call], T], call: Call, most: int = SAMPLES) -> list[T]:
    for _ in range(2):
        call()
    samples: list[T] = []
    end = time.monotonic() + SECONDS
    while len(samples) < most and (len(samples) < 3 or time.monotonic() < end):
        samples.append(clock(call))
    return samples


class Bench:
    """The device, tensor sets and clock of the sections."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device = device
        self.sets = QUICK_SETS if quick else SETS
        self.samples = 1 if quick else SAMPLES
        self.copy_bytes = COPY_BYTES >> (12 if quick else 0)
        self.clock = device_milliseconds if device == "cuda" else wall_milliseconds

    def row(
        self, name: str, operation: str, implementation: str, moved: float | None, call: Call
    ) -> Row:
        """Times a case. ``moved`` is the bytes that one call reads and writes."""
        times = samples_of(self.clock, call, self.samples)
        host, wall = zip(*samples_of(host_and_wall_milliseconds, call, self.samples), strict=True)
        return self.row_of(name, operation, implementation, moved, times, wall, host)

    @staticmethod
    def row_of(
        name: str,
        operation: str,
        implementation: str,
        moved: float | None,
        times: Sequence[float],
        wall: Sequence[float],
        host: Sequence[float],
    ) -> Row:
        """Returns a row of measured milliseconds: the device's, from idle to idle, the host's."""
        ms = median(times)
        return {
            "set": name,
            "operation": operation,
            "implementation": implementation,
            "milliseconds": ms,
            "samples": times,
            "wall_milliseconds": median(wall),
            "host_microseconds": 1e3 * median(host),
            "bytes": moved,
            "gigabytes_per_second": moved / ms / 1e6 if moved else None,
        }

    def case_row(self, name: str, case: Case, types: str = "") -> Row:
        moved = case.bytes_per_parameter
        count = parameters(self.sets[name])
        operation, implementation = case.operation, case.implementation
        return self.row(name + types, operation, implementation, moved and moved * count, case.call)

    def gradients(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return gradients_of(self.sets[name], dtype, self.device)


def copy(bench: Bench) -> Rows:
    source = torch.zeros(bench.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    moved = 2 * bench.copy_bytes
    yield bench.row(
        f"{bench.copy_bytes:,} bytes", COPY, "torch", moved, partial(target.copy_, source)
    )


def passes(bench: Bench) -> Rows:
    """Times pass A as an operator, and pass B as a step that neither clips nor checks."""
    count = parameters(bench.sets[BILLION])
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, BF16)):
        gradients = bench.gradients(BILLION, dtype)
        call = partial(ops.grad_sumsq_, gradients, ops.new_accumulator(bench.device))
        yield bench.row(f"{BILLION}, {name}", NORM, OURS, dtype.itemsize * count, call)
    int8 = {"state_dtype": torch.int8}
    for dtype, kwargs, update, name in (
        (torch.float32, {}, 28, "fp32"),
        (torch.bfloat16, {"master_weights": "fp32"}, 28, f"{BF16}, fp32 masters"),
        (torch.bfloat16, {"master_weights": "remainder"}, 26, f"{BF16}, remainders"),
        (torch.bfloat16, {}, 14, f"{BF16} throughout"),
        (torch.bfloat16, {"stochastic_rounding": True}, 14, f"{BF16} throughout, random"),
        (torch.float32, int8, 16.25, "fp32, 8-bit moments"),
        (torch.bfloat16, int8, 10.25, f"{BF16}, 8-bit moments"),
        (
            torch.bfloat16,
            {"stochastic_rounding": True, **int8},
            10.25,
            f"{BF16}, random 8-bit moments",
        ),
        (torch.float32, {"ema_decay": 0.999}, 40, "fp32, averages"),
        (
            torch.bfloat16,
            {"master_weights": "remainder", "ema_decay": 0.999},
            38,
            f"{BF16}, remainders, averages",
        ),
        (torch.float32, {"track": True}, 28, "fp32, tracked"),
        (
            torch.bfloat16,
            {"track": True, "master_weights": "fp32"},
            28,
            f"{BF16}, fp32 masters, tracked",
        ),
        (torch.bfloat16, {"track": True}, 14, f"{BF16} throughout, tracked"),
        (torch.bfloat16, {"track": True, **int8}, 10.25, f"{BF16}, 8-bit moments, tracked"),
    ):
        gradients = bench.gradients(BILLION, dtype)
        optimizer = FusedAdamW(params_with(gradients), **kwargs)
        yield bench.row(f"{BILLION}, {name}", UPDATE, OURS, update * count, optimizer.step)
        del gradients, optimizer


def fp32(bench: Bench) -> Rows:
    """Times the step and torch's clip_grad_norm_ and fused AdamW, also under gradient scalers."""
    for name in (BILLION, GPT2):
        for implementation in (OURS, FUSED):
            gradients = bench.gradients(name, torch.float32)
            operations = (CLIP, SCALER, STEP)
            for case in fp32_cases(implementation, gradients, bench.device, operations, False):
                yield bench.case_row(name, case)
            del case, gradients


def bf16(bench: Bench) -> Rows:
    """Times masters and torch's foreach operators, then everything in bf16."""
    for name in (BILLION, GPT2):
        for implementation in (MASTERS, REMAINDER):
            gradients = bench.gradients(name, torch.bfloat16)
            case = our_cases(implementation, gradients, bench.device)[0]
            yield bench.case_row(name, case, f", {BF16}")
            del case
        gradients = bench.gradients(name, torch.bfloat16)
        masters = TorchMasters(params_with(gradients))
        case = Case(PREALLOCATED, SCALER, masters.step_preallocated, BF16_BYTES[PREALLOCATED])
        yield bench.case_row(name, case, f", {BF16}")
        del case, masters
        params = params_with(gradients)
        ours = FusedAdamW(params, max_grad_norm=MAX_NORM)
        case = Case(OURS, CLIP, ours.step, BF16_BYTES[PLAIN])
        yield bench.case_row(name, case, f", {BF16} throughout")
        del case, ours, params
        params = params_with(gradients)
        call = partial(clip_and_step, params, torch.optim.AdamW(params, fused=True))
        yield bench.case_row(name, Case(FUSED, CLIP, call, None), f", {BF16} throughout")
        del call, params


def small(bench: Bench) -> Rows:
    """Times 2,000 tensors of 1,000, eager and captured."""
    count = parameters(bench.sets[SMALL])
    gradients = bench.gradients(SMALL, torch.float32)
    lr = torch.tensor(1e-3, device=bench.device)
    ours = FusedAdamW(params_with(gradients), lr=lr, max_grad_norm=MAX_NORM)
    theirs = params_with(gradients)
    capturable = bench.device == "cuda"
    optimizer = torch.optim.AdamW(theirs, lr=lr, fused=True, capturable=capturable)
    calls = {OURS: ours.step, FUSED: partial(clip_and_step, theirs, optimizer)}
    for implementation, call in calls.items():
        moved = BYTES[implementation, CLIP] * count
        yield bench.row(SMALL, CLIP, implementation, moved, call)
        if bench.device == "cuda":
            replay = captured(call)
            yield bench.row(SMALL, f"{CLIP}, {GRAPH}", implementation, moved, replay)
            yield flushed(bench, f"{CLIP}, {GRAPH}, {FLUSHED}", implementation, moved, replay)


def flushed(bench: Bench, operation: str, implementation: str, moved: float, call: Call) -> Row:
    """Times a call on the device after the L2 cache was overwritten."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=bench.device).zero_
    row = bench.row(SMALL, operation, implementation, moved, call)
    both = median(samples_of(bench.clock, lambda: (flush(), call())))
    ms = both - median(samples_of(bench.clock, flush))
    return row | {"milliseconds": ms, "gigabytes_per_second": moved / ms / 1e6}


def captured(call: Call) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def adapters(bench: Bench) -> Rows:
    """Times FSDPadaptOptimizer, whose step waits for the device, and torch operators."""
    for name in (GPT2, SMALL):
        for case in build_adapters(name, bench.sets[name], bench.device).cases:
            yield bench.case_row(name, case, f", {BF16}")


def peers(bench: Bench) -> Rows:
    """Times steps that neither clip nor check: ours with 8-bit moments, then other libraries'."""
    made: list[tuple[str, bool, Callable[..., Any]]] = []
    for remainder, name in ((None, "8-bit moments"), ("remainder8", "8-bit moments, remainder")):
        settings = {**SETTINGS, "state_dtype": torch.int8, "master_weights": remainder}
        ours = partial(FusedAdamW, **settings)
        made.append((f"{OURS}, {name}", True, lambda g, ours=ours: ours(params_with(g))))
    for peer in GPU:
        try:
            peer.load()
        except ImportError as error:
            yield {"note": str(error)}
        else:
            made.append((peer.name, peer.eight_bits, peer.make))
    for name in (BILLION, GPT2, SMALL):
        for implementation, narrow, make in made:
            if narrow and name == SMALL:
                continue
            gradients = bench.gradients(name, torch.bfloat16 if narrow else torch.float32)
            optimizer = make(gradients)
            moved = None if narrow else BYTES[FUSED, STEP] * parameters(bench.sets[name])
            types = f", {BF16}" if narrow else ""
            yield bench.row(name + types, STEP, implementation, moved, optimizer.step)
            del optimizer, gradients


# Long and short rows, a scalar, an empty tensor. Odd sizes misalign the tensors that follow.
SHORT: Shapes = [(300, 257), (3, 4096), (9001,), (7, 63), (1,), (), (0, 3)]


def short(bench: Bench) -> Rows:
    """Runs one clipped step in every type, under compute-sanitizer."""
    random = {"stochastic_rounding": True, "rounding_seed": 3}
    int8 = {"state_dtype": torch.int8}
    for dtype, kwargs in (
        (torch.float32, {"amsgrad": True}),
        (torch.float64, {}),
        (torch.float16, {"master_weights": "fp32"}),
        (torch.bfloat16, {"master_weights": "fp32", "track": True}),
        (torch.bfloat16, {"master_weights": "remainder", "write_back_gradients": True}),
        (torch.bfloat16, {"track": True, "write_back_gradients": True, **random}),
        (torch.float32, int8),
        (torch.bfloat16, int8),
        (torch.bfloat16, {**int8, **random}),
        (torch.bfloat16, {**int8, "master_weights": "remainder8", "track": True}),
        (torch.bfloat16, {**int8, "master_weights": "remainder8", "ema_decay": 0.9}),
        (torch.float32, {"ema_decay": 0.9, "ema_dtype": "bf16", "track": True}),
    ):
        flat = torch.randn(parameters(SHORT) + 1, device=bench.device).to(dtype)
        pieces = flat[1:].split([torch.Size(shape).numel() for shape in SHORT])
        gradients = [x.view(shape) for x, shape in zip(pieces, SHORT, strict=True)]
        params = params_with(gradients)
        optimizer = FusedAdamW(params, max_grad_norm=0.5, **kwargs)
        optimizer.step()
        copies = [torch.empty_like(p, dtype=torch.float32) for p in params]
        if dtype is not torch.float64:
            control = ops.new_control(bench.device, grad_factor=0.5)
            ops.scaled_copy_(copies, gradients, control, unscale=True)
        assert all(bool(p.isfinite().all()) for p in params)
    yield {"note": "steps in twelve ways to hold parameters"}


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    section.__name__: section
    for section in (copy, passes, fp32, bf16, small, adapters, offload, peers, short)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    options = parser.parse_args()
    rows: list[Row] = []
    for row in SECTIONS[options.section](Bench(options.device, options.quick)):
        rows.append(row)
        beside = options.out.with_suffix(".new")  # the section may be stopped while it writes
        beside.write_text(json.dumps(rows, indent=1))
        beside.replace(options.out)
        print(
            row.get("note")
            or f"{row['set']}, {row['operation']}, {row['implementation']}: "
            f"{row['milliseconds']:.4g} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""python -m torchopt_ext bench --offload: what states in memory of the host cost and save here."""

from __future__ import annotations

import functools
import statistics
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C, FusedAdamW
from torchopt_ext.cli import bench_runs
from torchopt_ext.cli.terminal import WIDTH, CommandError, figures, size, table
from torchopt_ext.cli.timing import seconds_of
from torchopt_ext.optim.estimate import estimate

cuda: Any = torch.cuda
ELEMENTS = 2**26
"""Float32 elements of each buffer: copies then take milliseconds."""
PCIE_5 = 55e9
"""Bytes per second and direction that copies reach, for what is not measured."""
UP, DOWN, BOTH = "copy to the GPU", "copy to the host", "copies both ways at once"
READ, WRITE = "kernel reads host memory", "kernel writes host memory"
READ_WRITE = "kernel reads and writes it"
HOST, BESIDE = "a += b on the host", "a += b on the host, beside copies"
ON_GPU, ON_CPU = "states on the GPU", "all on the CPU"
PATHS = {path: f"states on the host, {path!r}" for path in ("mapped", "staged", "host")}
"""What a step is called by offload_step."""
NEEDS_GPU = (
    "Not measured, as it needs a GPU: the link in each direction and both, kernels that read and "
    "write host memory, the host's bandwidth beside copies, and a GPU's step."
)
_Measure = Callable[[], float]
"""Returns the seconds of one run."""


def main(name: str, like: list[Tensor], options: Any) -> dict[str, Any]:
    """Measures the link, the host and the steps, and returns all results."""
    device = bench_runs.device_of(options)
    held = {"master_weights": options.master_weights, "state_dtype": options.state_dtype}
    if not has_link(device):
        bench_runs.check_memory(name, like)
    try:
        measures, bytes_of = transfers(device)
        steps = steps_of(like, device, held)
        measures |= steps
        for measure in measures.values():  # allocates
            measure()
        samples = bench_runs.timed(measures, lambda measure: measure(), options.seconds)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise CommandError(f"{name} on {device}: {bench_runs.first_sentence(error)}") from error
    ours, *_ = steps
    return {
        **bench_runs.described(name, like, options, device),
        "state_dtype": options.state_dtype,
        "bytes_on_host": estimate(like, state_device="cpu", **held)[0].host,
        "bytes_per_second": {
            label: moved / statistics.median(samples[label]) for label, moved in bytes_of.items()
        },
        "rounds": len(samples[ours]),
        "steps": {label: bench_runs.summary(samples[label], samples[ours]) for label in steps},
    }


def has_link(device: torch.device) -> bool:
    """Returns whether states can lie elsewhere than beside parameters on this device."""
    return device.type == "cuda"


def transfers(device: torch.device) -> tuple[dict[str, _Measure], dict[str, int]]:
    """Returns what is measured beside the steps, and the bytes that each moves."""
    ones = torch.ones(ELEMENTS)
    plain = functools.partial(torch.zeros_like(ones).add_, ones)
    count = 4 * ELEMENTS
    if not has_link(device):
        return {HOST: functools.partial(seconds_of, plain, device)}, {HOST: 3 * count}
    there, back = (torch.zeros(ELEMENTS, device=device) for _ in range(2))
    out, into = _C.carve([ones, ones], stepped_on=device)
    mapped = as_seen_by(device, out)
    up, down = (
        functools.partial(to.copy_, from_, non_blocking=True)
        for to, from_ in ((there, out), (into, back))
    )
    streams = [cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        for stream, copy in zip(streams, (up, down), strict=True):
            with cuda.stream(stream):
                copy()

    calls: dict[str, Callable[[], Any]] = {
        UP: up,
        DOWN: down,
        BOTH: both,
        READ: mapped.sum,
        WRITE: functools.partial(mapped.fill_, 1.0),
        READ_WRITE: functools.partial(mapped.add_, 1.0),
        HOST: plain,
    }

    def beside() -> float:
        """Runs on the host while copies in both directions are under way."""
        both_take, plain_takes = (seconds_of(call, device) for call in (both, plain))
        for _ in range(1 + int(1.5 * plain_takes / both_take)):
            both()
        start = time.perf_counter()
        plain()
        spent = time.perf_counter() - start
        cuda.synchronize(device)
        return spent

    measures: dict[str, _Measure] = {
        label: functools.partial(seconds_of, call, device) for label, call in calls.items()
    }
    measures[BESIDE] = beside
    times = {BOTH: 2, READ_WRITE: 2, HOST: 3, BESIDE: 3}
    return measures, {label: times.get(label, 1) * count for label in measures}


def as_seen_by(device: torch.device, host: Tensor) -> Tensor:
    """Returns a tensor of the GPU over page-locked memory of the host, which must outlive it."""

    class Interface:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(host.shape),
            "typestr": "<f4",
            "data": (host.data_ptr(), False),
            "version": 2,
        }
        keeps = host

    return torch.as_tensor(Interface(), device=device)


def steps_of(like: list[Tensor], device: torch.device, held: dict[str, Any]) -> dict[str, _Measure]:
    """Returns measures of clipping and one step, by place of the states and path."""

    def build(**placed: Any) -> FusedAdamW:
        params = bench_runs.filled(like, device)
        return FusedAdamW(params, max_grad_norm=bench_runs.MAX_NORM, **held, **placed)

    beside = functools.partial(seconds_of, build().step, device)
    if not has_link(device):
        return {ON_CPU: beside}
    on_host = build(state_device="cpu")  # one for all paths: the host may have no memory for three

    def step_by(path: str) -> float:
        on_host.offload_step = path  # type: ignore[assignment]
        on_host.step()  # prepares this path
        return seconds_of(on_host.step, device)

    paths = {label: functools.partial(step_by, path) for path, label in PATHS.items()}
    return {ON_GPU: beside, **paths}


# ---- what is shown -------------------------------------------------------------------------------


def as_text(results: dict[str, Any]) -> str:
    lines = [bench_runs.about(results)]
    if dtype := results["state_dtype"]:
        lines.append(f"moments of {dtype}")
    lines.append("")
    rates = [[label, figures(rate / 1e9)] for label, rate in results["bytes_per_second"].items()]
    rows = [
        [label, *(figures(1e3 * step[key]) for key in ("median", "q25", "q75"))]
        for label, step in results["steps"].items()
    ]
    lines += [table(["bandwidth", "GB/s"], rates), ""]
    lines += [table(["clip and step", "ms", "from", "to"], rows), ""]
    lines.append(f"medians and quartiles of {results['rounds']:,} rounds")
    if ON_CPU in results["steps"]:
        lines += ["", *textwrap.wrap(NEEDS_GPU, WIDTH)]
    return "\n".join([*lines, "", *textwrap.wrap(verdict(results), WIDTH)])


def verdict(results: dict[str, Any]) -> str:
    """Says in a sentence what states on the host would save and cost."""
    steps, moved = results["steps"], size(results["bytes_on_host"])
    if ON_GPU not in steps:
        least = figures(1e3 * results["bytes_on_host"] / PCIE_5)
        return (
            f"On a GPU, state_device='cpu' would take {moved} out of its memory, and a step would "
            f"move them over the link once in each direction: {least} ms at "
            f"{PCIE_5 / 1e9:.0f} GB/s (PCIe 5), which is arithmetic and not measured."
        )
    beside = 1e3 * steps[ON_GPU]["median"]
    by_path = {path: 1e3 * steps[label]["median"] for path, label in PATHS.items()}
    path = min(by_path, key=by_path.__getitem__)
    return (
        f"state_device='cpu' takes {moved} out of the GPU's memory, and clipping and a step then "
        f"take {figures(by_path[path])} ms with offload_step={path!r} instead of "
        f"{figures(beside)} ms."
    )

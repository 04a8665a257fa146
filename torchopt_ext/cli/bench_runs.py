"""What both kinds of bench share: the device, the parameters, timing, and what is said of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.cli.tensors import MASTERS_NAMED
from torchopt_ext.cli.terminal import CommandError, Progress, size
from torchopt_ext.cli.timing import Call, environment, in_turn, paired, quartiles

Clock = Callable[[Call], float]
MAX_NORM = 1.0
PLAIN = "a += b"
"""The roofline. Like a step, it writes what it has read, and reads more than it writes."""


def device_of(options: Any) -> torch.device:
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise CommandError(f"--device {options.device}: {first_sentence(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device is {options.device}, expected cpu or cuda")
    return device


def described(
    name: str, params: list[Tensor], options: Any, device: torch.device
) -> dict[str, Any]:
    """Returns what :func:`about` shows."""
    about = environment(device)
    return {
        "date": about["date"][:10],
        "model": name,
        "tensors": len(params),
        "parameters": sum(param.numel() for param in params),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in params}),
        "master_weights": options.master_weights,
        "device": about["device"],
        "instruction_set": about["torchopt_ext_kernels"] if device.type == "cpu" else None,
        "threads": about["threads"],
        "versions": {name: about[name] for name in ("torchopt_ext", "torch", "python")},
    }


def first_sentence(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def check_memory(name: str, like: list[Tensor]) -> None:
    """Rejects sizes for which Linux would grant memory and later kill the process."""
    needed = 8 * sum(param.numel() * param.dtype.itemsize for param in like)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise CommandError(
            f"{name} is too large: weights, gradients and the moments of three optimizers take "
            f"{size(needed)} of memory, and this machine has {size(there)}"
        )


def filled(like: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns parameters of these shapes with gradients, both of random values."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for one in like:
        param = torch.empty(one.shape, dtype=one.dtype, device=device).normal_(generator=generator)
        param.requires_grad_().grad = torch.empty_like(param).normal_(generator=generator)
        params.append(param)
    return params


def timed(steps: dict[str, Call], clock: Clock, seconds: float) -> dict[str, list[float]]:
    """Times the steps in turn for ``seconds``, and at least three rounds."""
    rounds: list[list[float]] = []
    gc.collect()
    end = time.perf_counter() + seconds
    with Progress("timing", seconds) as progress:
        for samples in in_turn(list(steps.values()), clock):
            rounds.append(samples)
            progress.add(min(sum(samples), seconds - progress.done))
            if time.perf_counter() >= end and len(rounds) >= 3:
                break
    return dict(zip(steps, map(list, zip(*rounds, strict=True)), strict=True))


def summary(times: list[float], ours: list[float]) -> dict[str, float]:
    low, median, high = quartiles(times)
    least, _, most = quartiles([n / d for n, d in zip(times, ours, strict=True)])
    return {
        "median": median, "q25": low, "q75": high,
        "times_ours": paired(times, ours), "times_ours_q25": least, "times_ours_q75": most,
    }  # fmt: skip


def about(results: dict[str, Any]) -> str:
    """Describes the machine and the timed model, in lines."""
    versions, kind, instructions = (
        results[name] for name in ("versions", "master_weights", "instruction_set")
    )
    held = f", {MASTERS_NAMED[kind]}" if kind else ""
    threads = f"{f'{instructions}, ' if instructions else ''}{results['threads']} threads"
    bandwidth = results.get("roofline_bytes_per_second")
    roofline = f"; {PLAIN} moves {size(bandwidth)}/s" if bandwidth else ""
    return (
        f"{results['model']}: {results['parameters']:,} parameters in {results['tensors']:,} "
        f"tensors, {', '.join(results['dtypes'])}{held}\n"
        f"{results['device']}, {threads}{roofline}\n"
        f"torchopt_ext {versions['torchopt_ext']}, torch {versions['torch']}, "
        f"Python {versions['python']}; {results['date']}"
    )

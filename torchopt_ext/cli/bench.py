"""python -m torchopt_ext bench: times the step and torch's, on this machine and these shapes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW, FusedMuon, muon_groups
from torchopt_ext.cli.tensors import (
    MASTERS_NAMED,
    Entry,
    Source,
    add_dtype,
    add_source,
    as_modules,
    from_options,
)
from torchopt_ext.cli.terminal import (
    CommandError,
    Parser,
    Progress,
    check_output,
    check_picture,
    figures,
    markdown,
    new_panel,
    number,
    positive,
    save_picture,
    size,
    table,
    written,
)
from torchopt_ext.cli.timing import Call, environment, in_turn, paired, quartiles, seconds_of
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.state.storage import MASTER_WEIGHTS, SIXTEEN_BIT, MasterWeights

OURS, FUSED = "torchopt_ext FusedAdamW", "torch AdamW fused"
OUR_MUON, MUON = "torchopt_ext FusedMuon", "torch Muon + AdamW fused"
MAX_NORM = 1.0
PLAIN = "a += b"
"""The roofline. Like a step, it writes what it has read, and reads more than it writes."""
ELEMENTS = 2**25
"""Elements of each of the roofline's two float32 tensors: more than caches hold."""
STATE_DTYPES = ("float32", "bfloat16", "int8")
Clock = Callable[[Call], float]


def parser() -> Parser:
    command = Parser(
        "bench",
        "Times clipping and one AdamW step: this package's, torch's, and those of bitsandbytes, "
        "apex and torchao where they are installed. All step the same parameters and gradients "
        "in turn. The roofline is a += b over large tensors on the same threads, also in turn. "
        "With --algorithm muon it times FusedMuon and torch's two optimizers.",
        """
        --shapes gpt2
        --shapes gpt2 --algorithm muon
        --model examples.model:build --seconds 10
        --shapes 2000x1000 --markdown bench.md --plot bench.png
        --params 1e8 --dtype bfloat16 --master-weights fp32 --json
        --params 1B --dtype bf16 --master-weights remainder8 --state-dtype int8 --offload
        """,
    )
    add_source(command)
    command.add_argument(
        "--algorithm",
        choices=("adamw", "muon"),
        default="adamw",
        help="of the step (adamw); muon steps the matrices that muon_groups chooses, and AdamW "
        "the rest, convolutions and stacks of matrices too, which torch's Muon does not take",
    )
    command.add_argument(
        "--master-weights",
        choices=tuple(MASTER_WEIGHTS),
        help="masters of 16-bit parameters; torch is then timed on fp32 copies, with the casts",
    )
    command.add_argument(
        "--offload",
        action="store_true",
        help="measure instead what states in host memory cost: the link, the host, the steps",
    )
    add_dtype(command, "--state-dtype", STATE_DTYPES, "with --offload, dtype of the moments")
    command.add_argument(
        "--device", help="cpu, cuda or such as cuda:1 (cpu; with --offload a GPU if there is one)"
    )
    command.add_argument("--threads", type=number, metavar="N", help="CPU threads (torch's number)")
    command.add_argument("--seconds", type=positive, default=12.0, help="how long to time (12)")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown table")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a bar chart, such as bench.png"
    )
    return command


def main(args: list[str]) -> int:
    options = parser().parse_args(args)
    check_offload(options)
    if options.threads is not None:
        if options.threads > (most := os.cpu_count() or 1):
            raise CommandError(f"--threads is {options.threads}; this machine has {most}")
        torch.set_num_threads(options.threads)
    source = from_options(options)
    name, trained = source.name, [e for e in source.entries if e.tensor.requires_grad]
    like = [entry.tensor for entry in trained]
    if options.plot is not None:
        check_picture(options.plot)
    if options.markdown is not None:
        check_output(options.markdown)
    if any(param.is_complex() for param in like):
        raise CommandError(
            f"{name} has complex parameters, which torch's fused AdamW does not support"
        )
    dtypes = {param.dtype for param in like}
    if options.master_weights is not None and dtypes.isdisjoint(SIXTEEN_BIT):
        raise CommandError(f"--master-weights needs 16-bit parameters, and {name} has none")
    if options.master_weights not in (None, "fp32") and torch.float16 in dtypes:
        raise CommandError("a remainder completes bfloat16 only: --master-weights fp32")
    if options.offload:
        from torchopt_ext.cli import bench_offload

        results = bench_offload.main(name, like, options)
        print(json.dumps(results, indent=2) if options.json else bench_offload.as_text(results))
        return 0
    chosen = matrices_of(source, trained) if options.algorithm == "muon" else None
    results = run(name, like, options, chosen)
    if options.markdown is not None:
        with written(options.markdown) as file:
            text = f"{about(results)}\n\n{markdown(*rows_of(results))}\n"
            file.write_text(text, encoding="utf-8")
    if options.plot is not None:
        draw(results, options.plot)
    print(json.dumps(results, indent=2) if options.json else as_text(results))
    return 0


def check_offload(options: Any) -> None:
    """Rejects options that do not go with --offload or need it, and chooses the device."""
    if options.state_dtype and not options.offload:
        raise CommandError("--state-dtype needs --offload")
    for name in ("markdown", "plot") if options.offload else ():
        if getattr(options, name) is not None:
            raise CommandError(f"--{name} does not go with --offload: --json prints all results")
    if options.offload and options.algorithm != "adamw":
        raise CommandError(f"--offload measures AdamW: --algorithm is {options.algorithm}")
    if options.device is None:
        has_gpu = options.offload and torch.cuda.is_available()
        options.device = "cuda" if has_gpu else "cpu"


def matrices_of(source: Source, trained: list[Entry]) -> set[int]:
    """Returns the positions of the matrices that Muon steps."""
    named = [
        entry._replace(name=entry.name or f"layers.{number}.weight")
        for number, entry in enumerate(trained)
    ]
    made = muon_groups(source.model or as_modules(named), quiet=True)
    names = {n for group in made if group["algorithm"] == "muon" for n, _ in group["params"]}
    chosen = {i for i, e in enumerate(named) if e.name in names and e.tensor.dim() == 2}
    if not chosen:
        raise CommandError(f"{source.name} has no matrices for Muon")
    return chosen


def run(
    name: str, like: list[Tensor], options: Any, chosen: Collection[int] | None = None
) -> dict[str, Any]:
    """Builds the optimizers, times their steps, and returns all results."""
    device = device_of(options)
    try:
        if device.type == "cpu":
            check_memory(name, like)
        params = filled(like, device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        fault = f"{name} is too large" if "memory" in str(error) else f"--device {options.device}"
        raise CommandError(f"{fault}: {first_sentence(error)}") from error
    clock = functools.partial(seconds_of, device=device)
    ones = torch.ones(ELEMENTS, device=device)
    plain = functools.partial(torch.zeros_like(ones).add_, ones)  # moves 12 bytes per element
    try:
        with quiet():
            steps, missing = peers(params, options.master_weights, chosen)
            missing += call_once(steps)
        plain()
        samples = timed({PLAIN: plain, **steps}, clock, options.seconds)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise CommandError(f"{name} is too large: {first_sentence(error)}") from error
    ours, *_ = steps
    groups = params if chosen is None else with_adamw(params, chosen)
    bandwidth = 12 * ELEMENTS / statistics.median(samples.pop(PLAIN))
    return {
        **described(name, params, options, device),
        "roofline_bytes_per_second": bandwidth,
        "bytes_moved": estimate(groups, master_weights=options.master_weights)[0].moved,
        "rounds": len(samples[ours]),
        "steps": {label: summary(times, samples[ours]) for label, times in samples.items()},
        "missing": missing,
    }


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


# ---- timing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences other packages' logs and warnings, such as torch.compile's in torchao's step."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def call_once(steps: dict[str, Call]) -> list[str]:
    """Calls each step, to allocate or compile. Removes and names the others' steps that fail."""
    failed = []
    with Progress("preparing", len(steps)) as progress:
        for label, step in [*steps.items()]:
            try:
                step()
            except Exception:  # of any kind, for example torch.compile's without a compiler
                if label not in OTHERS:
                    raise
                del steps[label]
                failed.append(label)
            progress.add(1)
    return failed


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
    return {"median": median, "q25": low, "q75": high, "times_ours": paired(times, ours)}


# ---- what is timed -------------------------------------------------------------------------------


def peers(
    params: list[Tensor], masters: MasterWeights | None, chosen: Collection[int] | None = None
) -> tuple[dict[str, Call], list[str]]:
    """Returns a step of each implementation, and the names of those that are not installed.

    Ours comes first. ``chosen`` are the positions of Muon's matrices, if it is Muon that is timed.
    """
    stepped = params
    around: Callable[[Call], Call] = functools.partial(functools.partial, clip_then, params)
    if masters is not None:
        stepped, around = on_copies(params)
    if chosen is not None:
        muon = FusedMuon(with_adamw(params, chosen), max_grad_norm=MAX_NORM, master_weights=masters)
        return {OUR_MUON: muon.step, MUON: around(torchs_muon(stepped, chosen))}, []
    ours = FusedAdamW(params, max_grad_norm=MAX_NORM, master_weights=masters)
    steps: dict[str, Call] = {OURS: ours.step}
    steps[FUSED] = around(torch.optim.AdamW(stepped, fused=True).step)
    steps["torch AdamW foreach"] = around(torch.optim.AdamW(stepped, foreach=True).step)
    missing = []
    for label, (module, name) in OTHERS.items():
        try:
            build = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(label)
        else:
            steps[label] = around(build(stepped).step)
    return steps, missing


def with_adamw(params: list[Tensor], chosen: Collection[int]) -> list[dict[str, Any]]:
    """Returns groups of Muon's matrices and of AdamW's parameters, the latter if there are any."""
    rest = [param for i, param in enumerate(params) if i not in chosen]
    groups = [{"params": [params[i] for i in chosen], "algorithm": "muon"}]
    return [*groups, {"params": rest, "algorithm": "adamw"}] if rest else groups


def torchs_muon(params: list[Tensor], chosen: Collection[int]) -> Call:
    """Returns the step of torch's Muon and, for the rest, of its fused AdamW."""
    muon, *rest = with_adamw(params, chosen)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(muon["params"])]
    optimizers += [torch.optim.AdamW(group["params"], fused=True) for group in rest]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def clip_then(params: list[Tensor], step: Call) -> None:
    clip_grad_norm_(params, MAX_NORM)
    step()


def on_copies(params: list[Tensor]) -> tuple[list[Tensor], Callable[[Call], Call]]:
    """Returns fp32 copies, and a function that wraps a step on them by casts before and after."""
    masters = [param.detach().float().requires_grad_() for param in params]
    grads = [torch.empty_like(master) for master in masters]
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad

    @torch.no_grad()
    def cast_and(step: Call) -> None:
        torch._foreach_copy_(grads, [p.grad for p in params if p.grad is not None])
        clip_then(masters, step)
        torch._foreach_copy_(params, masters)

    return masters, functools.partial(functools.partial, cast_and)


OTHERS = {
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "apex FusedAdam": ("apex.optimizers", "FusedAdam"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
}
"""Modules and classes of other packages' optimizers."""


# ---- what is shown -------------------------------------------------------------------------------


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


def rows_of(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["clip and step", "ms", "quartiles", "of roofline", "times ours"]
    rows = []
    ours, *_ = results["steps"]
    for label, step in results["steps"].items():
        ms = [figures(1e3 * step[key]) for key in ("median", "q25", "q75")]
        bandwidth = results["bytes_moved"] / step["median"]
        share = f"{bandwidth / results['roofline_bytes_per_second']:.0%}" if label == ours else ""
        rows.append([label, ms[0], f"{ms[1]} to {ms[2]}", share, f"{step['times_ours']:.2f}"])
    return header, rows


def as_text(results: dict[str, Any]) -> str:
    lines = [about(results), "", table(*rows_of(results)), ""]
    lines.append(
        f"medians of {results['rounds']:,} rounds; a step moves {size(results['bytes_moved'])}"
    )
    if results["missing"]:
        lines.append(f"not usable here: {', '.join(results['missing'])}")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws bars of medians with quartiles, and a line at the roofline of our step."""
    ours, *_ = results["steps"]
    panel = new_panel(6.4, 1.6 + 0.45 * len(results["steps"]))
    for y, (label, step) in enumerate(results["steps"].items()):
        low, median, high = (1e3 * step[key] for key in ("q25", "median", "q75"))
        color = "#1b6ca8" if label == ours else "#b8b8b8"
        panel.barh(y, median, xerr=[[median - low], [high - median]], color=color, capsize=2)
        panel.text(high, y, f"  {figures(median)}", va="center", fontsize=8)
    least = 1e3 * results["bytes_moved"] / results["roofline_bytes_per_second"]
    panel.axvline(least, color="black", lw=1, label="roofline of ours")
    panel.set_yticks(range(len(results["steps"])), list(results["steps"]), fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel("milliseconds to clip and step, lower is better", fontsize=8)
    panel.legend(frameon=False, fontsize=7, loc="upper right")
    panel.set_title(about(results), fontsize=7)
    save_picture(panel, path)

"""python -m torchopt_ext bench: times the step and torch's, on this machine and these shapes."""

from __future__ import annotations

import functools
import importlib
import json
import os
import statistics
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW, FusedMuon, muon_groups
from torchopt_ext.cli.bench_runs import (
    MAX_NORM,
    PLAIN,
    about,
    check_memory,
    described,
    device_of,
    filled,
    first_sentence,
    summary,
    timed,
)
from torchopt_ext.cli.model_files import from_options
from torchopt_ext.cli.tensors import Entry, Source, as_modules
from torchopt_ext.cli.terminal import (
    WIDTH,
    CommandError,
    Progress,
    check_output,
    check_picture,
    figures,
    markdown,
    new_panel,
    save_picture,
    size,
    table,
    written,
)
from torchopt_ext.cli.timing import Call, seconds_of
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.state.storage import SIXTEEN_BIT, MasterWeights

OURS, FUSED = "torchopt_ext FusedAdamW", "torch AdamW fused"
OUR_MUON, MUON = "torchopt_ext FusedMuon", "torch Muon + AdamW fused"
ELEMENTS = 2**25
"""Elements of each of the roofline's two float32 tensors: more than caches hold."""


def main(options: Any) -> int:
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
    return "\n".join([*lines, "", *textwrap.wrap(gain(results), WIDTH)])


def gain(results: dict[str, Any]) -> str:
    """Says in one sentence what our step gains beside the fastest of the others."""
    (ours, mine), *others = results["steps"].items()
    label, best = min(others, key=lambda step: step[1]["times_ours"])
    own, its = mine["median"], best["median"]
    texts = [f"{figures(1e3 * seconds)} ms" for seconds in (own, its)]
    if best["times_ours_q25"] <= 1 <= best["times_ours_q75"] or own == its:
        return f"You would gain no time here: {ours} and {label} take the same within their spread."
    if best["times_ours"] < 1 or its < own:
        return f"You would gain no time here: {label} takes {texts[1]} a step, {ours} {texts[0]}."
    return (
        f"You would gain {1 - own / its:.0%} of the time of {label}: a step takes {texts[0]} "
        f"instead of {texts[1]}, which saves {figures(1000 * (its - own))} s in 1,000 steps."
    )


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

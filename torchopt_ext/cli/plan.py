"""python -m torchopt_ext plan: shows memory and traffic of the optimizer before a run."""

from __future__ import annotations

import functools
import itertools
import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from torchopt_ext.cli import fits, paths
from torchopt_ext.cli.arguments import SHARDINGS
from torchopt_ext.cli.estimates import Plans, by_algorithm, estimates, fullest
from torchopt_ext.cli.model_files import from_options
from torchopt_ext.cli.terminal import (
    WIDTH,
    CommandError,
    Progress,
    figures,
    flops,
    new_panel,
    save_picture,
    size,
    table,
    unit_of,
)
from torchopt_ext.optim.estimate import RankBytes, unevenness
from torchopt_ext.state.storage import Storage

HELD = ("weights", "gradients", "masters", "moments", "averages")
COLORS = ("#b8b8b8", "#e08e45", "#5aa2d6", "#1b6ca8", "#8fbf6a")


def main(options: Any) -> int:
    storage = storage_of(options)
    of_each = len(fits.settings(options)) if options.gpu_memory else 1
    with Progress("planning", of_each * len(SHARDINGS) + 1) as progress:
        source = from_options(options)
        name, params = source.name, [entry.tensor for entry in source.entries]
        done = functools.partial(progress.add, 1)
        if options.gpu_memory:
            found = fits.search(source, options, done)
            answer: Any = (fits.as_json if options.json else fits.as_text)(source, *found, options)
        else:
            if options.master_weights and not any(map(storage.master_of, params)):
                kind = "16-bit" if options.master_weights == "fp32" else "bfloat16"
                raise CommandError(
                    f"--master-weights {options.master_weights} completes {kind} parameters, and "
                    f"{name} has none: see --dtype"
                )
            options.sharding = options.sharding or "zero1"
            groups, plans = estimates(
                source, options, SHARDINGS, done,
                master_weights=options.master_weights,
                state_dtype=storage.state_dtype,
                state_device=options.state_device,
                state_fraction=options.state_fraction or 1.0,
            )  # fmt: skip
            if options.plot is not None:
                draw(name, plans, options.plot)
            answer = (as_json if options.json else as_text)(name, groups, plans, options)
    print(json.dumps(answer, indent=2) if options.json else answer)
    return 0


def storage_of(options: Any) -> Storage:
    dtype = options.state_dtype and getattr(torch, options.state_dtype)
    return Storage(options.master_weights, dtype)


def seconds(ranks: list[RankBytes], options: Any) -> dict[str, float]:
    """Returns the times of the slowest rank, if bandwidths are given."""
    times = {}
    if options.bandwidth:
        times["step_seconds"] = max(rank.moved for rank in ranks) / (options.bandwidth * 1e9)
    if options.network:
        times["send_seconds"] = max(rank.sent for rank in ranks) / (options.network * 1e9)
    return times


def by_path(ranks: list[RankBytes], options: Any) -> dict[str, float]:
    """Returns the seconds of a step over states on the host, if the link's bandwidth is given."""
    if not options.link:
        return {}
    return paths.slowest(ranks, options.link, options.host_bandwidth)


def as_json(name: str, groups: list[dict[str, Any]], plans: Plans, options: Any) -> dict[str, Any]:
    params = [param for group in groups for param in group["params"]]
    trained = [p.numel() for p in params if p.requires_grad]
    return {
        "model": name,
        "tensors": len(params),
        "parameters": sum(p.numel() for p in params),
        "trainable": sum(trained),
        "algorithms": {
            algorithm: {"tensors": len(stepped), "elements": sum(p.numel() for p in stepped)}
            for algorithm, stepped in by_algorithm(groups).items()
        },
        "world_size": options.world_size,
        "passed_over": storage_of(options).passed_over(params, stochastic_rounding=False),
        "shardings": {
            sharding: {
                "uneven": unevenness([rank.elements for rank in ranks]),
                **seconds(ranks, options),
                **in_paths(ranks, options),
                "ranks": [
                    vars(rank)
                    | {"host_step": rank.host_step._asdict()}
                    | {"held": rank.held, "on_device": rank.on_device}
                    for rank in ranks
                ],
            }
            for sharding, ranks in plans.items()
        },
    }


def in_paths(ranks: list[RankBytes], options: Any) -> dict[str, Any]:
    found = by_path(ranks, options)
    return {"offload_seconds": found, "fastest": paths.fastest(found)} if found else {}


def as_text(name: str, groups: list[dict[str, Any]], plans: Plans, options: Any) -> str:
    params = [param for group in groups for param in group["params"]]
    total, trained = sum(p.numel() for p in params), [p for p in params if p.requires_grad]
    counted = Counter[torch.dtype]()
    for param in params:
        counted[param.dtype] += param.numel()
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype, _ in counted.most_common())
    frozen = total - sum(p.numel() for p in trained)
    lines = [
        name,
        f"{total:,} parameters in {len(params):,} tensors, {dtypes}"
        + (f"; {frozen:,} frozen" if frozen else ""),
    ]
    if len(stepped := by_algorithm(groups)) > 1:
        lines += [
            f"{algorithm}: {sum(p.numel() for p in its):,} elements in {len(its):,} tensors"
            for algorithm, its in stepped.items()
        ]
    passed_over = storage_of(options).passed_over(params, stochastic_rounding=False)
    lines += textwrap.wrap(passed_over or "", 80)
    most = {sharding: fullest(ranks) for sharding, ranks in plans.items()}
    unit, scale = unit_of(max(rank.held for rank in most.values()))
    ranks_text = f"{options.world_size:,} rank{'s' if options.world_size > 1 else ''}"
    unit_text = f"{unit} on the rank that holds most"
    times = {sharding: [*seconds(ranks, options).items()] for sharding, ranks in plans.items()}
    longest = max((value for each in times.values() for _, value in each), default=0.0)
    time_unit, per_second = ("ms", 1e3) if longest < 100 else ("s", 1.0)
    if longest:
        unit_text += f", times in {time_unit}"
    lines += ["", f"{ranks_text}; {unit_text}:", ""]
    named = dict(zip(HELD, ("weights", "grads", "masters", "moments", "EMA"), strict=True))
    if options.ema_decay is None:
        del named["averages"]

    def cells(rank: RankBytes) -> list[str]:
        counts = (getattr(rank, column) for column in (*named, "held", "moved", "sent"))
        return [figures(count / scale) for count in counts]

    columns = [*named.values(), "held", "moved", "sent"]
    header = ["", *columns, *(key.removesuffix("_seconds") for key, _ in times["ddp"])]
    rows = [
        [sharding, *cells(rank), *(figures(per_second * t) for _, t in times[sharding])]
        for sharding, rank in most.items()
    ]
    lines.append(table(header, rows))
    lines += about_host(plans, options)
    lines += about_muon(plans)
    if options.world_size == 1:
        return "\n".join(lines)
    lines += ["", "Elements that a rank steps:", ""]
    shares = []
    for title, sharding in (("greedy", "zero1"), ("balanced", "balanced"), ("rows", "fsdp")):
        if sharding not in plans:
            continue
        elements = [rank.elements for rank in plans[sharding]]
        uneven = f"{unevenness(elements):+.1%}"
        shares.append([title, f"{min(elements):,}", f"{max(elements):,}", uneven])
    lines += [table(["plan", "least", "most", "most to mean"], shares)]
    lines += ["", f"{options.sharding}, rank by rank, in {unit}:", ""]
    rows, shown = [], {rank: cells(rank) for rank in {*plans[options.sharding]}}
    for row, group in itertools.groupby(
        enumerate(shown[rank] for rank in plans[options.sharding]), key=lambda at: at[1]
    ):
        first, *_, last = [n for n, _ in group] * 2
        rows.append([f"{first}" if first == last else f"{first}-{last}", *row])
    return "\n".join([*lines, table(["rank", *columns], rows)])


def about_host(plans: Plans, options: Any) -> list[str]:
    """Returns lines about states on the host, and what each way to step them takes."""
    if not options.state_device:
        return []
    most = {plan: max(ranks, key=lambda rank: rank.host) for plan, ranks in plans.items()}
    times = {plan: by_path(ranks, options) for plan, ranks in plans.items()}
    unit, scale = unit_of(max(max(rank.host, rank.on_device) for rank in most.values()))
    text = (
        f"States on the host, in {unit} on the rank with most there. A step of the GPU moves them "
        f"in each direction (mapped, staged); one of the CPU (host) moves gradients and "
        f"weights down and up, and has buffers for them there"
        + ("; times in ms:" if options.link else ":")
    )
    header = ["", "states", "on GPU", "down", "up", "buffers"]
    if options.link:
        header.append(", ".join(paths.STREAMED))
    if options.host_bandwidth:
        header += [paths.HOST, "fastest"]
    rows = []
    for plan, rank in most.items():
        step, its = rank.host_step, times[plan]
        counts = (rank.host, rank.on_device, step.down, step.up, step.buffers)
        taken = [figures(1e3 * its[path]) for path in (paths.MAPPED, paths.HOST) if path in its]
        named = [paths.fastest(its)] if options.host_bandwidth else []
        rows.append([plan, *(figures(count / scale) for count in counts), *taken, *named])
    return ["", *textwrap.wrap(text, WIDTH), "", table(header, rows)]


def about_muon(plans: Plans) -> list[str]:
    """Returns lines about Newton-Schulz's products."""
    lines = []
    work = {plan: [rank.newton_schulz_flops for rank in ranks] for plan, ranks in plans.items()}
    if whole := max(work.pop("ddp")):
        divided = [
            f"{flops(max(of))} with {plan} ({max(of) * len(of) / sum(of):.2f} times the mean)"
            for plan, of in work.items()
            if max(of) < whole
        ]
        text = f"Newton-Schulz: {flops(whole)} a step"
        if divided:
            text += f"; on the rank with most, {', '.join(divided)}"
        lines += ["", *textwrap.wrap(text, WIDTH)]
    return lines


def draw(name: str, plans: Plans, path: Path) -> None:
    """Draws bars of the bytes that the fullest rank holds, and marks at the mean of all ranks."""
    most = [fullest(ranks) for ranks in plans.values()]
    unit, scale = unit_of(max(rank.held for rank in most))
    panel = new_panel(6.4, 4.0)
    bottom = [0.0] * len(most)
    for part, color in zip(HELD, COLORS, strict=True):
        heights = [getattr(rank, part) / scale for rank in most]
        if any(heights):
            panel.bar(list(plans), heights, bottom=bottom, color=color, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, (ranks, top) in enumerate(zip(plans.values(), bottom, strict=True)):
        panel.text(x, top, size(top * scale), ha="center", va="bottom", fontsize=8)
        mean = sum(rank.held for rank in ranks) / len(ranks) / scale
        label = "mean of all ranks" if x == 0 else None
        panel.hlines(mean, x - 0.42, x + 0.42, color="black", lw=1.2, label=label)
    panel.set_ylabel(f"{unit} held on the fullest rank")
    panel.set_ylim(0, 1.12 * max(bottom))
    panel.legend(frameon=False, fontsize=8)
    count = len(next(iter(plans.values())))
    panel.set_title(f"{Path(name).name}, {count:,} ranks", fontsize=10)
    save_picture(panel, path)

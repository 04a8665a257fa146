"""python -m torchopt_ext plan: shows memory and traffic of the optimizer before a run."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.cli.tensors import DTYPES, Entry, add_dtype, add_source, from_options
from torchopt_ext.cli.terminal import (
    CommandError,
    Parser,
    Progress,
    figures,
    listed,
    new_panel,
    number,
    positive,
    save_picture,
    size,
    table,
    unit_of,
)
from torchopt_ext.optim.estimate import SHARDINGS, RankBytes, estimate, unevenness
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.state.algorithms import NAMES
from torchopt_ext.state.storage import MASTER_WEIGHTS, Storage

HELD = ("weights", "gradients", "masters", "moments")
COLORS = ("#b8b8b8", "#e08e45", "#5aa2d6", "#1b6ca8")
MOST_RANKS = 1_000_000
MEANING = """\
ddp       every rank holds everything, as a single process does
zero1     ZeroRedundancyOptimizer, whole tensors (greedy)
balanced  partition="balanced", with reduce_scatter_hook
zero2     partition="balanced", sharded_gradients=True
fsdp      fully_shard: weights are sharded, too, and gathered when they are used"""


def parser() -> Parser:
    command = Parser(
        "plan",
        "Shows what each rank holds and moves with a fused optimizer, without activations and "
        "communication buffers.",
        """
        --params 8e9 --world-size 8 --dtype bfloat16 --master-weights fp32
        --model examples.model:build --sharding zero2 --bandwidth 200
        model.safetensors.index.json --world-size 64 --plot plan.png
        """,
        MEANING,
        "[FILE]",
    )
    command.add_argument(
        "file", nargs="?", help="a safetensors file, or the index of several; only headers are read"
    )
    add_source(command)
    command.add_argument("--world-size", type=number, default=8, metavar="W", help="ranks (8)")
    command.add_argument(
        "--sharding", choices=SHARDINGS, default="zero1", help="plan whose ranks are listed (zero1)"
    )
    add_dtype(command, "--grad-dtype", DTYPES, "dtype of gradients (their parameters')")
    command.add_argument(
        "--master-weights", choices=tuple(MASTER_WEIGHTS), help="FusedAdamW's master_weights (none)"
    )
    add_dtype(command, "--state-dtype", ("float32", "bfloat16", "int8"), "dtype of the moments")
    command.add_argument(
        "--fp32-moments",
        type=listed,
        metavar="A,B,C",
        help='parameters that keep fp32 moments with int8: "embedding", or patterns of names; "" '
        "for none (embedding)",
    )
    command.add_argument("--algorithm", choices=NAMES, default="adamw", help="of the step (adamw)")
    command.add_argument("--amsgrad", action="store_true", help="include Adam's third moment")
    command.add_argument("--momentum", action="store_true", help="include SGD's momentum")
    command.add_argument(
        "--no-norm", action="store_true", help="gradients are neither clipped nor checked"
    )
    for option, text in (
        ("--bandwidth", "bandwidth of memory; adds the step's time"),
        ("--network", "network bandwidth of a rank; adds the time to send"),
    ):
        command.add_argument(option, type=positive, metavar="GB/S", help=text)
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw bars, such as plan.png")
    return command


def main(args: list[str]) -> int:
    options = parser().parse_args(args)
    chosen = [options.file, options.model, options.params, options.shapes]
    if sum(source is not None for source in chosen) != 1:
        raise CommandError("give one of FILE, --model, --params and --shapes")
    if options.world_size > MOST_RANKS:
        raise CommandError(f"--world-size {options.world_size:,}: expected {MOST_RANKS:,} at most")
    with Progress("planning", len(SHARDINGS) + 1) as progress:
        name, entries = from_options(options)
        params = [entry.tensor for entry in entries]
        if options.master_weights and not any(map(storage_of(options).master_of, params)):
            kind = "16-bit" if options.master_weights == "fp32" else "bfloat16"
            raise CommandError(
                f"--master-weights {options.master_weights} completes {kind} parameters, and "
                f"{name} has none: see --dtype"
            )
        plans = {}
        try:
            fp32_moments = chosen_fp32(entries, options)
            for sharding in SHARDINGS:
                plans[sharding] = estimate(
                    params,
                    sharding=sharding,
                    world_size=options.world_size,
                    grad_dtype=options.grad_dtype and DTYPES[options.grad_dtype],
                    master_weights=options.master_weights,
                    state_dtype=storage_of(options).state_dtype,
                    fp32_moments=fp32_moments,
                    algorithm=options.algorithm,
                    amsgrad=options.amsgrad,
                    momentum=options.momentum,
                    norm=not options.no_norm,
                )
                progress.add(1)
        except (TypeError, ValueError) as error:
            raise CommandError(f"{name}: {error}") from error
        if options.plot is not None:
            draw(name, plans, options.plot)
        if options.json:
            text = json.dumps(as_json(name, params, plans, options), indent=2)
        else:
            text = as_text(name, params, plans, options)
    print(text)
    return 0


def storage_of(options: Any) -> Storage:
    dtype = options.state_dtype and getattr(torch, options.state_dtype)
    return Storage(options.master_weights, dtype)


def chosen_fp32(entries: list[Entry], options: Any) -> Collection[Tensor]:
    """Returns the tensors that `--fp32-moments` selects."""
    chosen = options.fp32_moments
    if not is_8_bit(options.state_dtype):
        if chosen is not None:
            raise CommandError("--fp32-moments needs --state-dtype int8")
        return ()
    named = [(entry.name, entry.tensor) for entry in entries]
    embeddings = [entry.tensor for entry in entries if entry.embedding]
    return fp32_params(named, EMBEDDINGS if chosen is None else chosen, embeddings)


def fullest(ranks: list[RankBytes]) -> RankBytes:
    return max(ranks, key=lambda rank: rank.held)


def seconds(ranks: list[RankBytes], options: Any) -> dict[str, float]:
    """Returns the times of the slowest rank, if bandwidths are given."""
    times = {}
    if options.bandwidth:
        times["step_seconds"] = max(rank.moved for rank in ranks) / (options.bandwidth * 1e9)
    if options.network:
        times["send_seconds"] = max(rank.sent for rank in ranks) / (options.network * 1e9)
    return times


def as_json(
    name: str, params: list[Tensor], plans: dict[str, list[RankBytes]], options: Any
) -> dict[str, Any]:
    trained = [p.numel() for p in params if p.requires_grad]
    return {
        "model": name,
        "tensors": len(params),
        "parameters": sum(p.numel() for p in params),
        "trainable": sum(trained),
        "world_size": options.world_size,
        "passed_over": storage_of(options).passed_over(params, stochastic_rounding=False),
        "shardings": {
            sharding: {
                "uneven": unevenness([rank.elements for rank in ranks]),
                **seconds(ranks, options),
                "ranks": [vars(rank) | {"held": rank.held} for rank in ranks],
            }
            for sharding, ranks in plans.items()
        },
    }


def as_text(
    name: str, params: list[Tensor], plans: dict[str, list[RankBytes]], options: Any
) -> str:
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
    columns = ["weights", "grads", "masters", "moments", "held", "moved", "sent"]
    header = ["", *columns, *(key.removesuffix("_seconds") for key, _ in times["ddp"])]
    rows = [
        [sharding, *cells(rank, scale), *(figures(per_second * t) for _, t in times[sharding])]
        for sharding, rank in most.items()
    ]
    lines.append(table(header, rows))
    if options.world_size == 1:
        return "\n".join(lines)
    lines += ["", "Elements that a rank steps:", ""]
    shares = []
    for title, sharding in (("greedy", "zero1"), ("balanced", "balanced"), ("rows", "fsdp")):
        elements = [rank.elements for rank in plans[sharding]]
        uneven = f"{unevenness(elements):+.1%}"
        shares.append([title, f"{min(elements):,}", f"{max(elements):,}", uneven])
    lines += [table(["plan", "least", "most", "most to mean"], shares)]
    lines += ["", f"{options.sharding}, rank by rank, in {unit}:", ""]
    rows, shown = [], {rank: cells(rank, scale) for rank in {*plans[options.sharding]}}
    for row, group in itertools.groupby(
        enumerate(shown[rank] for rank in plans[options.sharding]), key=lambda at: at[1]
    ):
        first, *_, last = [n for n, _ in group] * 2
        rows.append([f"{first}" if first == last else f"{first}-{last}", *row])
    return "\n".join([*lines, table(["rank", *columns], rows)])


def cells(rank: RankBytes, scale: float) -> list[str]:
    held = [getattr(rank, name) for name in HELD]
    return [figures(count / scale) for count in (*held, rank.held, rank.moved, rank.sent)]


def draw(name: str, plans: dict[str, list[RankBytes]], path: Path) -> None:
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

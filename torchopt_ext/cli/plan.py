"""python -m torchopt_ext plan: shows memory and traffic of the optimizer before a run."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.cli.tensors import (
    DTYPES,
    Entry,
    Source,
    add_dtype,
    add_source,
    as_modules,
    from_options,
)
from torchopt_ext.cli.terminal import (
    WIDTH,
    CommandError,
    Parser,
    Progress,
    figures,
    flops,
    listed,
    new_panel,
    number,
    positive,
    save_picture,
    size,
    table,
    unit_of,
)
from torchopt_ext.optim.estimate import (
    SHARDINGS,
    CutMatricesError,
    RankBytes,
    estimate,
    unevenness,
)
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.optim.muon_groups import muon_groups
from torchopt_ext.state.algorithms import ALGORITHMS, NAMES
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
        --shapes gpt2 --algorithm muon --rest lion
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
    command.add_argument(
        "--algorithm",
        choices=NAMES,
        default="adamw",
        help="of the step (adamw); muon and normuon step the matrices that muon_groups chooses",
    )
    rest = [name for name, of in NAMES.items() if not ALGORITHMS[of].steps_matrices]
    command.add_argument("--rest", choices=rest, help="algorithm beside Muon (adamw)")
    command.add_argument(
        "--not-muon",
        type=listed,
        metavar="A,B,C",
        help="patterns of the names of further parameters that Muon does not step",
    )
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
    command.add_argument(
        "--state-device", choices=("cpu",), help="hold masters and moments in memory of the host"
    )
    command.add_argument(
        "--state-fraction",
        type=positive,
        metavar="F",
        help="the part of them that is held there (1)",
    )
    command.add_argument(
        "--link", type=positive, metavar="GB/S", help="between GPU and host, in each direction"
    )
    command.add_argument(
        "--gpu-memory", type=positive, metavar="GB", help="of a GPU: says what fits beside it"
    )
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw bars, such as plan.png")
    return command


def main(args: list[str]) -> int:
    options = parser().parse_args(args)
    chosen = [options.file, options.model, options.params, options.shapes]
    for option in ("state_fraction", "link"):
        if getattr(options, option) and not options.state_device:
            raise CommandError(f"--{option.replace('_', '-')} needs --state-device cpu")
    if sum(source is not None for source in chosen) != 1:
        raise CommandError("give one of FILE, --model, --params and --shapes")
    if options.world_size > MOST_RANKS:
        raise CommandError(f"--world-size {options.world_size:,}: expected {MOST_RANKS:,} at most")
    with Progress("planning", len(SHARDINGS) + 1) as progress:
        source = from_options(options)
        name, entries = source.name, source.entries
        params = [entry.tensor for entry in entries]
        if options.master_weights and not any(map(storage_of(options).master_of, params)):
            kind = "16-bit" if options.master_weights == "fp32" else "bfloat16"
            raise CommandError(
                f"--master-weights {options.master_weights} completes {kind} parameters, and "
                f"{name} has none: see --dtype"
            )
        plans = {}
        try:
            groups = groups_of(source, options)
            fp32_moments = chosen_fp32(entries, options)
            for sharding in SHARDINGS:
                try:
                    plans[sharding] = estimate(
                        groups,
                        sharding=sharding,
                        world_size=options.world_size,
                        grad_dtype=options.grad_dtype and DTYPES[options.grad_dtype],
                        master_weights=options.master_weights,
                        state_dtype=storage_of(options).state_dtype,
                        state_device=options.state_device,
                        state_fraction=options.state_fraction or 1.0,
                        fp32_moments=fp32_moments,
                        norm=not options.no_norm,
                    )
                except CutMatricesError:
                    if sharding == options.sharding:
                        raise
                progress.add(1)
        except (TypeError, ValueError) as error:
            raise CommandError(f"{name}: {error}") from error
        if options.plot is not None:
            draw(name, plans, options.plot)
        if options.json:
            text = json.dumps(as_json(name, groups, plans, options), indent=2)
        else:
            text = as_text(name, groups, plans, options)
    print(text)
    return 0


def groups_of(source: Source, options: Any) -> list[dict[str, Any]]:
    """Returns param groups with all tensors: one, or for Muon those that muon_groups makes."""
    asked = {"amsgrad": options.amsgrad, "momentum": 0.9 * options.momentum}
    chosen = {key: value for key, value in asked.items() if value}
    if not ALGORITHMS[NAMES[options.algorithm]].steps_matrices:
        for option in ("rest", "not_muon"):
            if getattr(options, option) is not None:
                raise CommandError(f"--{option.replace('_', '-')} needs --algorithm muon")
        tensors = [entry.tensor for entry in source.entries]
        names = [entry.name for entry in source.entries]
        of_all = {"algorithm": options.algorithm, **chosen}
        return [{"params": tensors, "param_names": names, **of_all}]
    left = {entry.name: entry.tensor for entry in source.entries}
    if "" in left or len(left) < len(source.entries):
        raise CommandError(
            f"Muon's matrices are chosen by names and modules, which {source.name} does not have: "
            f"give --model, FILE or --shapes gpt2"
        )
    if options.file is not None and options.not_muon is None:
        raise CommandError(
            f"{source.name} does not say which of its tensors are embeddings: name them, such as "
            f'--not-muon embed_tokens (or "" if there are none)'
        )
    made = muon_groups(
        source.model or as_modules(source.entries),
        adamw=options.not_muon or (),
        adamw_options={"algorithm": options.rest or "adamw", **chosen},
        quiet=True,
    )
    groups: list[dict[str, Any]] = []
    for group in made:
        names = [name for name, _ in group["params"]]
        group |= {"params": [*map(left.pop, names)], "param_names": names}
        if group["algorithm"] == "muon":
            group["algorithm"] = options.algorithm
        groups.append(group)
    return [*groups, {"params": [*left.values()], "param_names": [*left]}]  # the frozen ones


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
    if options.link:
        times["link_seconds"] = max(rank.host for rank in ranks) / (options.link * 1e9)
    return times


def by_algorithm(groups: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """Returns the trained tensors that each algorithm steps."""
    stepped: dict[str, list[Tensor]] = {}
    for group in groups:
        if trained := [p for p in group["params"] if p.requires_grad]:
            stepped.setdefault(group["algorithm"], []).extend(trained)
    return stepped


def as_json(
    name: str, groups: list[dict[str, Any]], plans: dict[str, list[RankBytes]], options: Any
) -> dict[str, Any]:
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
                "ranks": [
                    vars(rank) | {"held": rank.held, "on_device": rank.on_device} for rank in ranks
                ],
            }
            for sharding, ranks in plans.items()
        },
    }


def as_text(
    name: str, groups: list[dict[str, Any]], plans: dict[str, list[RankBytes]], options: Any
) -> str:
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
    columns = ["weights", "grads", "masters", "moments", "held", "moved", "sent"]
    header = ["", *columns, *(key.removesuffix("_seconds") for key, _ in times["ddp"])]
    rows = [
        [sharding, *cells(rank, scale), *(figures(per_second * t) for _, t in times[sharding])]
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
    rows, shown = [], {rank: cells(rank, scale) for rank in {*plans[options.sharding]}}
    for row, group in itertools.groupby(
        enumerate(shown[rank] for rank in plans[options.sharding]), key=lambda at: at[1]
    ):
        first, *_, last = [n for n, _ in group] * 2
        rows.append([f"{first}" if first == last else f"{first}-{last}", *row])
    return "\n".join([*lines, table(["rank", *columns], rows)])


def about_host(plans: dict[str, list[RankBytes]], options: Any) -> list[str]:
    """Returns lines about states on the host, and about what fits into a GPU's memory."""
    lines = []
    if options.state_device:
        of = {plan: max(ranks, key=lambda rank: rank.host) for plan, ranks in plans.items()}
        lines = [
            f"{plan}: {size(rank.host)} of states on the host, {size(rank.on_device)} on the GPU"
            for plan, rank in of.items()
        ]
    if options.gpu_memory:
        most = options.gpu_memory * 1e9
        lines += [f"{plan}: {_fit(fullest(ranks), most)}" for plan, ranks in plans.items()]
    return ["", *lines] if lines else []


def _fit(rank: RankBytes, most: float) -> str:
    """Says whether a rank's bytes fit, and how many of its states must lie on the host."""
    left = most - rank.on_device
    if left >= 0:
        return f"fits, and leaves {size(left)} for activations and buffers"
    movable = rank.masters + rank.moments - rank.host
    if movable + left < 0:
        return f"does not fit, even with all states on the host: {size(-movable - left)} too much"
    fraction = math.ceil(100 * (rank.host - left) / (rank.masters + rank.moments)) / 100
    return f"fits with --state-device cpu --state-fraction {fraction:g}, with nothing left"


def about_muon(plans: dict[str, list[RankBytes]]) -> list[str]:
    """Returns lines about Newton-Schulz's products, and the plans that are left out."""
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
    if cut := [sharding for sharding in SHARDINGS if sharding not in plans]:
        lines += ["", f"Left out, as NorMuon needs whole rows: {', '.join(cut)}"]
    return lines


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

"""Which settings of an optimizer fit into a GPU's memory, fastest first."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from torchopt_ext.cli import paths
from torchopt_ext.cli.arguments import SHARDINGS, SHORT
from torchopt_ext.cli.estimates import estimates
from torchopt_ext.cli.tensors import Source, as_dtype
from torchopt_ext.cli.terminal import WIDTH, CommandError, figures, size, table, unit_of
from torchopt_ext.optim.estimate import RankBytes

SHOWN = 12
RESERVE = 0.1
"""The share of a GPU that activations and buffers need at least, where nothing else is known."""
TIGHT = f", and last, marked *, those that leave less than {RESERVE:.0%} of the GPU's memory"
BANDWIDTH, LINK = 2000.0, 50.0
"""GB/s of a GPU's memory and of its link to the host, for the order where options do not say."""
CLASSES = {
    "adam": "FusedAdam", "adamw": "FusedAdamW", "lion": "FusedLion", "sgd": "FusedSGD",
    "muon": "FusedMuon", "normuon": "FusedMuon",
}  # fmt: skip


class Setting(NamedTuple):
    """Names as on the command line; None for the dtype of parameters that keep their own."""

    dtype: str | None
    master_weights: str | None
    state_dtype: str | None
    stochastic_rounding: bool = False

    @property
    def arguments(self) -> str:
        """The setting as arguments of an optimizer."""
        values = self._asdict()
        del values["dtype"]
        if self.state_dtype == "float32":  # the default
            del values["state_dtype"]
        return "".join(f", {name}={value!r}" for name, value in values.items() if value)


SETTINGS = (
    Setting("float32", None, "float32"),
    Setting("float32", None, "bfloat16", stochastic_rounding=True),
    Setting("float32", None, "int8"),
    Setting("bfloat16", "fp32", "float32"),
    Setting("bfloat16", "remainder", "float32"),
    Setting("bfloat16", "remainder8", "float32"),
    Setting("bfloat16", "remainder", "bfloat16", stochastic_rounding=True),
    Setting("bfloat16", "remainder8", "int8"),
    Setting("bfloat16", None, "bfloat16", stochastic_rounding=True),
)
"""The settings that train as well as fp32 (docs/memory.md)."""


@dataclass(frozen=True)
class Fit:
    """A setting that fits. Of all ranks, bytes are the most, and what is left the least.

    ``on_host`` has the buffers of a step by the CPU, if ``path`` is "host". ``offload_seconds`` are
    the paths' for which the host has memory.
    """

    sharding: str
    setting: Setting
    state_fraction: float
    on_gpu: int
    left: int
    on_host: int
    offload_seconds: dict[str, float]
    path: str
    moved: int
    sent: int


def settings(options: Any) -> list[Setting]:
    """Returns the settings that the options leave open, or the only one that they describe."""
    given = (options.dtype, options.master_weights, options.state_dtype)
    found = [
        setting
        for setting in SETTINGS
        if all(want in (None, has) for want, has in zip(given, setting, strict=False))
    ]
    return found or [Setting(*given)]


def search(source: Source, options: Any, done: Callable[[], None]) -> tuple[list[Fit], int]:
    """Returns what fits, and otherwise the fewest bytes that are missing.

    The fastest come first, and last those that leave less than the reserve.
    """
    most = int(options.gpu_memory * 1e9)
    shardings = [options.sharding] if options.sharding else [*SHARDINGS]
    if options.world_size == 1 and not options.sharding:
        shardings = ["ddp"]
    fits: list[Fit] = []
    missing: list[int] = []
    problem = None
    for setting in settings(options):
        model = source._replace(entries=as_dtype(source.entries, setting.dtype))
        storage = {
            "master_weights": setting.master_weights,
            "state_dtype": setting.state_dtype and getattr(torch, setting.state_dtype),
            "state_device": "cpu",  # what could lie there
            "state_fraction": options.state_fraction or 1.0,
        }
        try:
            _, plans = estimates(model, options, shardings, done, **storage)
        except CommandError as error:  # such as amsgrad with 8 bits
            problem = error
            continue
        for sharding, ranks in plans.items():
            found = fit(sharding, setting, {*ranks}, most, options)
            if found.left < 0:
                missing.append(-found.left)
            elif options.host_memory and found.on_host > options.host_memory * 1e9:
                missing.append(found.on_host - int(options.host_memory * 1e9))
            else:
                fits.append(found)
    if not fits and not missing and problem is not None:
        raise problem
    # Times that are shown as equal are equal.
    fits.sort(key=lambda each: (
        is_tight(each, options), float(f"{seconds(each, options):.2e}"), each.sent, -each.left,
    ))  # fmt: skip
    return fits, min(missing, default=0)


def fit(sharding: str, setting: Setting, ranks: set[RankBytes], most: int, options: Any) -> Fit:
    """Returns how ranks fit, with no more states on the host than they must.

    They leave the reserve where the host has room. What ``--state-device`` and ``--state-fraction``
    say is not changed. If a rank does not fit, less than nothing is left.

    Args:
        ranks: their bytes with all states on the host, or those of ``--state-fraction``.
    """
    fraction = moved_there = 1.0
    if options.state_device:
        fraction = options.state_fraction or 1.0
    else:
        least, wanted = (
            max(max(0, rank.held - limit) / (rank.host or 1) for rank in ranks)
            for limit in (most, most - int(RESERVE * most))
        )
        room = (options.host_memory or math.inf) * 1e9 / (max(rank.host for rank in ranks) or 1)
        least, wanted = math.ceil(100 * least), math.ceil(100 * wanted)
        fraction = moved_there = min(1.0, max(least, min(wanted, int(100 * min(1.0, room)))) / 100)
    on_gpu = max(rank.held - round(moved_there * rank.host) for rank in ranks)
    on_host = dict.fromkeys(paths.STREAMED, max(rank.host for rank in ranks))
    on_host[paths.HOST] = max(rank.host + int(rank.host_step.buffers) for rank in ranks)
    on_host = {path: round(moved_there * held) for path, held in on_host.items()}
    room = options.host_memory * 1e9 if options.host_memory else math.inf
    times = {
        path: moved_there * seconds
        for path, seconds in paths.slowest(
            ranks, options.link or LINK, options.host_bandwidth
        ).items()
        if path in paths.STREAMED or on_host[path] <= room
    }
    path = paths.fastest(times)
    return Fit(
        sharding,
        setting,
        fraction,
        on_gpu=on_gpu,
        left=most - on_gpu,
        on_host=on_host[path],
        offload_seconds=times,
        path=path,
        moved=max(rank.moved for rank in ranks),
        sent=max(rank.sent for rank in ranks),
    )


def seconds(fit: Fit, options: Any) -> float:
    """Returns the time of the step, and of sending if the network's bandwidth is known."""
    memory = fit.moved / (options.bandwidth or BANDWIDTH)
    sent = fit.sent / options.network if options.network else 0.0
    return max(memory / 1e9, fit.offload_seconds[fit.path]) + sent / 1e9


def is_tight(fit: Fit, options: Any) -> bool:
    """Returns whether a setting leaves less than the reserve."""
    return fit.left < int(RESERVE * int(options.gpu_memory * 1e9))


def as_json(source: Source, fits: list[Fit], missing: int, options: Any) -> dict[str, Any]:
    return {
        "model": source.name,
        "world_size": options.world_size,
        "gpu_memory": int(options.gpu_memory * 1e9),
        "fits": [asdict(each) | {"setting": each.setting._asdict()} for each in fits],
        "missing": 0 if fits else missing,
    }


def as_text(source: Source, fits: list[Fit], missing: int, options: Any) -> str:
    total = sum(entry.tensor.numel() for entry in source.entries)
    count = options.world_size
    gpus = f"{count:,} GPUs" if count > 1 else "1 GPU"
    lines = [
        source.name,
        f"{total:,} parameters in {len(source.entries):,} tensors; {gpus} of "
        f"{size(options.gpu_memory * 1e9)}",
        "",
    ]
    if not fits:
        beside = "" if options.state_device else ", even with states in memory of the host"
        text = (
            f"Nothing fits: {size(missing)} are missing for each GPU{beside}. Divide the model "
            f"over more GPUs (--world-size), or step in backward, which keeps no gradients "
            f"(docs/in_backward.md)."
        )
        return "\n".join([*lines, *textwrap.wrap(text, WIDTH)])
    unit, scale = unit_of(max(max(each.left, each.moved) for each in fits))
    timed = options.bandwidth or options.link
    header = ["", "weights", "masters", "moments", "on host", "left", "moved", "sent"]
    rows = []
    for each in fits[:SHOWN]:
        dtype, masters, moments, is_random = each.setting
        rows.append([
            each.sharding,
            SHORT.get(dtype or "", "own"),
            masters or "",
            SHORT.get(moments or "", moments or "") + is_random * " random",
            figures(each.on_host / scale),
            figures(each.left / scale) + is_tight(each, options) * "*",
            *(figures(n / scale) for n in (each.moved, each.sent)),
            *([figures(1e3 * seconds(each, options))] if timed else []),
            *([each.path if each.on_host else ""] if options.host_bandwidth else []),
        ])  # fmt: skip
    tight = any(is_tight(each, options) for each in fits)
    text = (
        f"These fit, fastest first{tight * TIGHT}. In {unit} on the rank that holds most: states "
        f"on the host, memory left for activations and buffers, bytes that a step moves and that "
        f"a training step sends" + ("; times in ms:" if timed else ":")
    )
    lines += [*textwrap.wrap(text, WIDTH), ""]
    header += ["step"] * bool(timed) + ["path"] * bool(options.host_bandwidth)
    lines += [table(header, rows, text=4), ""]
    if len(fits) > SHOWN:
        lines.append(f"{len(fits) - SHOWN:,} more fit: --json lists them.")
    return "\n".join([*lines, *textwrap.wrap(advice(fits, options), WIDTH)])


def advice(fits: list[Fit], options: Any) -> str:
    """Says how the first row is written in Python, and what the order assumes."""
    first, place, timed = fits[0], "", options.bandwidth or options.link
    if first.state_fraction:
        place = ", state_device='cpu'"
        place += f", state_fraction={first.state_fraction:g}" if first.state_fraction < 1 else ""
        place += f", offload_step={first.path!r}" if first.path != paths.MAPPED else ""
    if options.ema_decay is not None:
        place += f", ema_decay={options.ema_decay:g}"
        place += f", ema_dtype={options.ema_dtype!r}" if options.ema_dtype else ""
    made = f"{CLASSES[options.algorithm]}(params{first.setting.arguments}{place})"
    over = f" over {first.setting.dtype} weights" if first.setting.dtype else ""
    text = f"The first row is {made}{over}."
    if options.world_size > 1:
        text += f" {first.sharding}: {SHARDINGS[first.sharding]}."
    if first.on_host and timed:
        its = [f"{path} {figures(1e3 * s)}" for path, s in first.offload_seconds.items()]
        text += f" Its states on the host take, in ms: {', '.join(its)}."
    if any(fit.on_host for fit in fits) and not (options.bandwidth and options.link):
        text += (
            f" The order assumes memory of {options.bandwidth or BANDWIDTH:,.0f} GB/s and a link "
            f"of {options.link or LINK:,.0f} GB/s: see --bandwidth and --link."
        )
    return text

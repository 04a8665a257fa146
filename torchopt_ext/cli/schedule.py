"""python -m torchopt_ext schedule: shows learning rates by step, before a run."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchopt_ext.cli.arguments import CHOICES, MOST_STEPS
from torchopt_ext.cli.terminal import (
    CommandError,
    Progress,
    new_panel,
    save_picture,
    table,
    written,
)
from torchopt_ext.containers.build import common_arguments
from torchopt_ext.containers.lr_schedulers import schedule_from_config, schedule_from_job_config

COLUMNS = 60
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"
TABLED = 4
"""Curves that fit next to each other in a table."""
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Curve:
    """A schedule: its name, its learning rate before the factor, and the factor of each step."""

    name: str
    lr: float
    factors: list[float]

    @functools.cached_property
    def rates(self) -> list[float]:
        return [self.lr * factor for factor in self.factors]


def main(options: Any) -> int:
    asked = {n: values for n in CHOICES if (values := getattr(options, n)) is not None}
    with Progress("computing", 1):
        curves = [from_job(path) for path in options.config]
        if options.steps is not None:
            defaults = {name: [default] for name, (default, *_) in CHOICES.items()}
            curves += from_flags(options.steps, defaults | asked)
        if options.plot is not None:
            draw(curves, options.plot)
        text = as_text(curves, options.rows) if options.csv != "-" else as_csv(curves)
        if options.csv not in (None, "-"):
            with written(Path(options.csv)) as file:
                file.write_text(as_csv(curves), encoding="utf-8")
    sys.stdout.write(f"{text}\n" if options.csv != "-" else text)
    return 0


# ---- curves --------------------------------------------------------------------------------------


def from_job(path: str) -> Curve:
    """Returns the schedule of a job's TOML file."""
    from torchopt_ext.trainer.load_config import load_config  # needs the Trainer's packages

    try:
        job = load_config(["--config", path], prog="python -m torchopt_ext schedule")
        lr = job.optimizer.lr
        if lr is None:
            lr = common_arguments(job.optimizer)["lr"]
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error
    steps = job.lr_scheduler.total_steps or job.training.steps
    if not 0 <= lr < math.inf:
        raise CommandError(f"optimizer.lr is {lr} in {path}, expected a number of 0 or more")
    if not 1 <= steps <= MOST_STEPS:
        raise CommandError(f"{path} has {steps:,} steps, expected 1 to {MOST_STEPS:,}")
    return sampled(Path(path).stem, lr, steps, schedule_from_job_config, job)


def from_flags(steps: int, named: Mapping[str, list[Any]]) -> list[Curve]:
    """Returns a curve for each combination of values, named by the values that differ."""
    differing = [key for key, values in named.items() if len(values) > 1]
    curves = []
    for values in itertools.product(*named.values()):
        chosen = dict(zip(named, values, strict=True))
        name = " ".join(
            str(chosen[key]) if key == "decay" else f"{key}={chosen[key]:g}" for key in differing
        )
        section = SimpleNamespace(
            warmup_steps=chosen["warmup"],
            decay_ratio=chosen["decay_ratio"],
            decay_type=chosen["decay"],
            min_lr_factor=chosen["min_factor"],
            compat="torchtitan" if chosen["generation"] == 1 else None,
        )
        curves.append(sampled(name, chosen["lr"], steps, schedule_from_config, section, steps))
    return curves


def sampled(name: str, lr: float, steps: int, schedule: Callable[..., Any], *of: Any) -> Curve:
    try:
        factor = schedule(*of)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return Curve(name, lr, factor(torch.arange(steps)).tolist())


# ---- what is shown -------------------------------------------------------------------------------


def as_text(curves: Sequence[Curve], rows: int) -> str:
    """Formats a line for each curve, and a table of some steps."""
    highest = max(max(curve.rates) for curve in curves) or 1.0
    steps = max(len(curve.factors) for curve in curves)
    lines = [f"{steps:,} steps; highest {highest:.4g}", ""]
    for curve in curves:
        if curve.name:
            lines.append(curve.name)
        lines.append(
            "  " + sparkline(curve.rates, highest, round(COLUMNS * len(curve.rates) / steps))
        )
    count = max(2, min(rows, steps))
    shown = sorted({round(n * (steps - 1) / (count - 1)) for n in range(count)})
    for first in range(0, len(curves), TABLED):
        some = curves[first : first + TABLED]
        names = (curve.name if len(curve.name) <= 15 else f"{curve.name[:14]}~" for curve in some)
        header = ["step", *(name or "lr" for name in names)]
        columns = [
            [f"{curve.rates[step]:.4g}" if step < len(curve.factors) else "" for step in shown]
            for curve in some
        ]
        body = [[f"{step:,}", *row] for step, *row in zip(shown, *columns, strict=True)]
        lines += ["", table(header, body)]
    return "\n".join(lines)


def sparkline(values: Sequence[float], highest: float, columns: int) -> str:
    """Formats values as a line of blocks. Each block is the mean of the values it stands for."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        BLOCKS.encode(encoding)
        blocks = BLOCKS
    except UnicodeEncodeError:
        blocks = ASCII
    columns = max(1, min(columns, len(values)))
    edges = [n * len(values) // columns for n in range(columns + 1)]
    shares = [value / highest for value in values]  # sums of shares are finite
    means = [sum(shares[lo:hi]) / (hi - lo) for lo, hi in itertools.pairwise(edges)]
    return "".join(blocks[min(7, int(8 * mean))] for mean in means)


def as_csv(curves: Sequence[Curve]) -> str:
    """Formats every step of every curve as CSV. Steps after a curve's end are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(curve.name or "lr" for curve in curves)])
    for step, row in enumerate(itertools.zip_longest(*(curve.rates for curve in curves))):
        writer.writerow([step, *("" if value is None else repr(value) for value in row)])
    return text.getvalue()


def draw(curves: Sequence[Curve], path: Path) -> None:
    panel = new_panel(6.4, 3.6)
    for n, curve in enumerate(curves):
        panel.plot(curve.rates, label=curve.name or None, lw=1.6, ls=STYLES[n % len(STYLES)])
    panel.set_xlabel("step")
    panel.set_ylabel("learning rate")
    panel.set_ylim(bottom=0)
    if any(curve.name for curve in curves):
        panel.legend(frameon=False, fontsize=8)
    save_picture(panel, path)

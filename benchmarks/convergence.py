"""Trains small models with every way to keep weights and moments, and with fp32. See README.md.

python benchmarks/convergence.py --out out/convergence
python benchmarks/convergence.py --muon --out out/convergence-muon

Results of runs are kept in OUT/runs. The next call makes the missing runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from convergence_chart import draw
from small_tasks import Task, held_out_loss, loss_of, teacher, text
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import torchopt_ext
from torchopt_ext import FusedAdamW, FusedMuon, muon_groups
from torchopt_ext.cli.timing import environment

MAX_NORM = 1.0
COMMON: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.1}
MUON: dict[str, Any] = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
TASKS = {"transformer": text, "perceptron": teacher}
RATES = {"transformer": 3e-3, "perceptron": 1e-3}  # the peak learning rates
POINTS = 20  # how often a run computes the held-out loss
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Setting:
    name: str
    arguments: dict[str, Any] | None = field(default_factory=dict)  # ours; None: torch's classes
    bf16: bool = False
    recommended: bool = True  # by docs/memory.md
    muon: bool = False  # for hidden matrices, with AdamW for the rest

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        common: dict[str, Any] = {"max_grad_norm": MAX_NORM, **(self.arguments or {})}
        if not self.muon and self.arguments is None:
            return [torch.optim.AdamW(model.parameters(), **COMMON)]
        if not self.muon:
            return [FusedAdamW(model.named_parameters(), **COMMON, **common)]
        groups = muon_groups(model, quiet=True, adamw_options=COMMON)
        if self.arguments is not None:
            return [FusedMuon(groups, **MUON, **common)]
        members: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for group in groups:
            members[group["algorithm"]] += group["params"]
        return [torch.optim.Muon(members["muon"], **MUON),
                torch.optim.AdamW(members["adamw"], **COMMON)]  # fmt: skip


def bf16(name: str, recommended: bool = True, muon: bool = False, **arguments: Any) -> Setting:
    return Setting(f"bf16, {name}", arguments, True, recommended, muon)


INT8: dict[str, Any] = {"state_dtype": "int8", "fp32_moments": ()}  # also for the embedding
SETTINGS = [
    Setting("fp32, torch.optim.AdamW", None),
    Setting("fp32"),
    Setting("fp32, int8 moments", INT8),
    bf16("fp32 masters", master_weights="fp32"),
    bf16("remainder", master_weights="remainder"),
    bf16(
        "remainder, bf16 moments, stochastic",
        master_weights="remainder",
        state_dtype=torch.bfloat16,
        stochastic_rounding=True,
    ),
    bf16("remainder, int8 moments", master_weights="remainder", **INT8),
    bf16("remainder8, int8 moments", master_weights="remainder8", **INT8),
    bf16("bf16 moments, stochastic", stochastic_rounding=True),
    bf16("bf16 moments, nearest", recommended=False),
]
MUON_SETTINGS = [
    Setting("fp32, torch.optim.Muon and AdamW", None, muon=True),
    Setting("fp32", muon=True),
    Setting("fp32, products of bf16", {"orthogonalize_dtype": torch.bfloat16}, muon=True),
    Setting("fp32, NorMuon", {"beta2": 0.95}, muon=True),
    bf16("remainder8, int8 momentum", muon=True, master_weights="remainder8", **INT8),
]


def rate(task: Task, step: int, steps: int) -> float:
    """Returns the learning rate: linear warmup over a twentieth of the steps, linear decay to 0."""
    return RATES[task.name] * min(1.0, 20 * step / steps, (1 + steps - step) / (0.95 * steps))


def train(task: Task, setting: Setting, seed: int, steps: int) -> Curve:
    """Returns steps and held-out losses in nats of a run. The last loss is after the last step."""
    model = task.model(seed)
    if setting.bf16:  # leaves out tables of rotary positions, which are buffers
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizers = setting.optimizers(model)
    batches = task.batches(seed)
    curve = []
    for step in range(1, steps + 1):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(task, step, steps)
            optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        if setting.arguments is None:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
        if step % max(1, steps // POINTS) == 0 or step == steps:
            curve.append((step, held_out_loss(model, task)))
    return curve


@dataclass(frozen=True)
class Run:
    """A training run, and the file that keeps its curve."""

    folder: Path
    task: str
    setting: Setting
    seed: int
    steps: int

    @property
    def path(self) -> Path:
        slug = re.sub(r"\W+", "-", f"{self.task} {self.setting.name} {self.seed}")
        return self.folder / f"{slug}.json"

    @property
    def made_with(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "torchopt_ext": torchopt_ext.__version__}
        return {"setting": repr(self.setting), "steps": self.steps, **versions}

    def kept(self) -> Curve | None:
        """Returns the curve in the file if this run made it with the same versions."""
        if not self.path.exists():
            return None
        record = json.loads(self.path.read_text())
        return record["curve"] if record["made_with"] == self.made_with else None

    def __call__(self) -> None:
        torch.set_num_threads(1)  # the models are small, and several runs share the machine
        curve = train(TASKS[self.task](), self.setting, self.seed, self.steps)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"made_with": self.made_with, "curve": curve}) + "\n")
        part.replace(self.path)


def complete(runs: Sequence[Run], jobs: int) -> None:
    """Makes the runs that have no kept result, `jobs` at a time."""
    todo = [run for run in runs if run.kept() is None]
    spawn = multiprocessing.get_context("spawn")  # OpenMP's threads do not survive a fork
    with ProcessPoolExecutor(jobs, spawn) as pool:
        futures = [pool.submit(run) for run in todo]
        for future in tqdm(
            as_completed(futures), total=len(runs), initial=len(runs) - len(todo), desc="runs"
        ):
            future.result()


def compare(
    task: str, settings: Sequence[Setting], curves: dict[str, list[Curve]]
) -> list[dict[str, Any]]:
    """Returns a row per setting: final losses by seed, and their differences from the first's.

    A setting passes if its mean is above the first's by at most the spread of the first's losses.
    """
    final = {s.name: [curve[-1][1] for curve in curves[s.name]] for s in settings}
    base = final[settings[0].name]
    spread = max(base) - min(base)
    rows = []
    for setting in settings:
        losses = final[setting.name]
        more = [loss - other for loss, other in zip(losses, base, strict=True)]
        row = {
            "task": task,
            "setting": setting.name,
            "recommended": setting.recommended,
            "losses": losses,
            "mean": statistics.fmean(losses),
            "difference": more,
            "mean_difference": statistics.fmean(more),
            "spread": spread,
            "within_spread": statistics.fmean(more) <= spread,
            "curves": curves[setting.name],
        }
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | weights and moments | validation loss | more than torch's | over its spread | |",
        "|---|---|---|---|---|---|",
    ]
    for previous, row in zip([None, *rows], rows, strict=False):
        task = row["task"] if previous is None or previous["task"] != row["task"] else ""
        cells = [task, row["setting"], f"{row['mean']:.4f}", "", "", ""]
        if task:
            cells[4] = f"spread {row['spread']:.4f}"
        else:
            cells[3] = f"{row['mean_difference']:+.4f}"
            cells[4] = f"{row['mean_difference'] / row['spread']:+.2f}" if row["spread"] else "-"
            cells[5] = "pass" if row["within_spread"] else "fail"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/convergence"))
    parser.add_argument("--only", default="", help='settings whose name has it, such as "int8"')
    parser.add_argument("--muon", action="store_true", help="Muon and AdamW, instead of AdamW")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    args = parser.parse_args()

    folder = args.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    base, *others = MUON_SETTINGS if args.muon else SETTINGS
    settings = [base, *(setting for setting in others if args.only in setting.name)]
    seeds = range(1, 1 + args.seeds)
    # One seed after the other, so that a stopped call has results of every setting.
    runs = [Run(folder, t, s, seed, args.steps) for seed in seeds for t in TASKS for s in settings]
    complete(runs, args.jobs)
    rows = []
    for task in TASKS:
        curves: dict[str, list[Curve]] = {setting.name: [] for setting in settings}
        for run in runs:
            if run.task == task:
                curves[run.setting.name].append(run.kept() or [])
        rows += compare(task, settings, curves)
    table = markdown(rows)
    about = {"environment": environment(), "steps": args.steps}
    everything = json.dumps({**about, "results": rows}, indent=1)
    (args.out / "convergence.json").write_text(everything + "\n")
    (args.out / "convergence.md").write_text(table)
    draw(rows, args.out / "convergence.png")
    print(table)


if __name__ == "__main__":
    main()

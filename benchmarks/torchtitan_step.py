"""Times the optimizer's part of torchtitan's training steps. See README.md.

python benchmarks/torchtitan_step.py --out out/bench-torchtitan

torchtitan's Trainer trains, and clips and steps with its own container and with ours in turn.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from cases import FUSED, OURS
from harness import Case, Group, Row
from ranks import run_ranks

ROOT = Path(__file__).parents[1]
NAMES = {"stock": FUSED, "ours": f"{OURS}, deferred clipping"}
WHOLE, PART = "training step", "clip+step"
WHAT = ("clip", "step", PART, WHOLE)
WARM_UP = 4  # untimed steps, which create state and plans
VERSION = importlib.metadata.version("torchtitan")


def options_of(folder: Path, steps: int) -> list[str]:
    """Returns the command line of the example's job, which clips in the step."""
    if VERSION.startswith("0.2."):
        return [
            f"--job.config_file={ROOT / 'examples/torchtitan_0_2/job.toml'}",
            *[f"--job.dump_folder={folder}", f"--model.hf_assets_path={folder / 'tokenizer'}"],
            *[f"--training.dataset_path={folder / 'data'}", f"--training.steps={steps}"],
            "--metrics.log_freq=1000",
        ]
    return [
        *["--module=config", "--config=llama3", f"--dump_folder={folder}"],
        *[f"--hf_assets_path={folder / 'tokenizer'}", f"--training.steps={steps}"],
        *[f"--dataloader.dataset_path={folder / 'data'}", "--metrics.log_freq=1000"],
    ]


# ---- on a rank -----------------------------------------------------------------------------------


def milliseconds(call: Any, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return (time.perf_counter() - start) * 1e3, result


class ByTurns:
    """Replaces the Trainer's container by torchtitan's own and ours over the same parameters."""

    def __init__(self, trainer: Any, stock: Any, train_step: Any) -> None:
        from torchtitan.distributed import utils

        self.containers = {"stock": stock, "ours": trainer.optimizers}
        deferred = utils.clip_grad_norm_  # ours has replaced torchtitan's by it
        self.clips = {"stock": deferred.__wrapped__, "ours": deferred}
        utils.clip_grad_norm_ = self.clip
        inner = {name: type(each.optimizers[0]) for name, each in self.containers.items()}
        self.classes = {name: f"{cls.__module__}.{cls.__name__}" for name, cls in inner.items()}
        assert self.classes["stock"].startswith("torch.")
        self.sizes = [p.numel() for part in trainer.model_parts for p in part.parameters()]
        self.samples: dict[str, dict[str, list[float]]] = {
            name: {what: [] for what in WHAT} for name in self.containers
        }
        self.original = train_step
        self.steps = 0
        self.spent: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.containers["ours"], name)

    @property
    def turn(self) -> str:
        """The container of this step: stock, ours, ours, stock, and so on."""
        return ("stock", "ours")[(self.steps + self.steps // 2) % 2]

    def clip(self, *args: Any, **kwargs: Any) -> Any:
        self.spent["waiting"] = milliseconds(dist.barrier)[0]
        self.spent["clip"], norm = milliseconds(self.clips[self.turn], *args, **kwargs)
        return norm

    def step(self) -> None:
        self.spent["step"], _ = milliseconds(self.containers[self.turn].step)

    def train_step(self, trainer: Any, batches: Any) -> None:
        whole, _ = milliseconds(self.original, trainer, batches)
        clip, step = self.spent["clip"], self.spent["step"]
        spent = torch.tensor([clip, step, clip + step, whole - self.spent["waiting"]])
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # the slowest rank's
        if self.steps >= WARM_UP:
            for what, value in zip(WHAT, spent.tolist(), strict=True):
                self.samples[self.turn][what].append(value)
        self.steps += 1


def on_rank(*arguments: str) -> dict[str, Any]:
    """Trains on a rank. torchtitan 0.2 reads the arguments when it is imported."""
    sys.argv[1:] = arguments
    folders = ("tests/distributed/torchtitan_cpu", "examples/torchtitan_0_3")
    sys.path += [str(ROOT / folder) for folder in folders]
    if not torch.accelerator.is_available():
        importlib.import_module("cpu_shim").install()
    old = VERSION.startswith("0.2.")
    optimizer = importlib.import_module("torchtitan.components.optimizer")
    build_optimizers = old and optimizer.build_optimizers  # before ours replaces it
    module = importlib.import_module("torchtitan.train" if old else "torchtitan.trainer")
    train_step = module.Trainer.train_step
    turns: list[ByTurns] = []

    def by_turns(trainer: Any, batches: Any) -> None:
        if not turns:
            if old:
                config, dims = trainer.job_config.optimizer, trainer.parallel_dims
                stock = build_optimizers(trainer.model_parts, config, dims)
            else:
                config, parts = trainer.config.optimizer, trainer.model_parts
                stock = optimizer.OptimizersContainer(config, model_parts=parts)
            turns.append(ByTurns(trainer, stock, train_step))
            trainer.optimizers = turns[0]
        turns[0].train_step(trainer, batches)

    module.Trainer.train_step = by_turns
    if old:
        module.main(module.Trainer)
    else:
        module.time.sleep = lambda seconds: None  # sleeps 2 s at the end, for ranks on other hosts
        importlib.import_module("torchtitan.train").main()
    return {name: getattr(turns[0], name) for name in ("samples", "classes", "sizes")}


# ---- all ranks -----------------------------------------------------------------------------------


def rows_of(name: str, result: dict[str, Any]) -> list[Row]:
    """Returns rows for the optimizers' operations in a training step."""
    timed = [
        (Case(NAMES[key], operation, lambda: None), values)
        for key, operations in result["samples"].items()
        for operation, values in operations.items()
        if operation != WHOLE
    ]
    cases, samples = zip(*timed, strict=True)
    shapes = [(count,) for count in result["sizes"]]
    return harness.rows_of(name, Group(name, shapes, list(cases), FUSED), samples)


def shares(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the milliseconds of a training step, and the share of clipping and step in it."""
    lines = []
    for key, implementation in NAMES.items():
        of = {what: statistics.median(values) for what, values in result["samples"][key].items()}
        share = f"{100 * of[PART] / of[WHOLE]:.2f} %"
        lines.append((name, implementation, f"{of[WHOLE]:.1f}", share))
    return lines


def main() -> None:
    parser = harness.parser(__doc__, "bench-torchtitan", rounds=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about = harness.start(options)
    about |= {"torchtitan": VERSION, "threads": f"{options.threads} of all ranks together"}
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assets = ROOT / "tests/distributed/torchtitan_cpu/assets.py"
        subprocess.run([sys.executable, assets, folder], check=True)
        for ranks in options.ranks:
            layout = "1 process" if ranks == 1 else f"FSDP2 on {ranks} ranks"
            arguments = options_of(folder, WARM_UP + 2 * options.rounds)
            threads, log = max(1, options.threads // ranks), options.out / f"{ranks}.log"
            result = run_ranks(on_rank, ranks, *arguments, threads=threads, log=log)
            about["optimizers"] = ", ".join(result["classes"].values())
            rows += rows_of(f"llama3 debugmodel, {layout}", result)
            lines += shares(layout, result)
    header = ("layout", "implementation", "ms", PART)
    sections = {"A training step": harness.table(header, lines, 2)}
    harness.write(options.out / "torchtitan", about, rows, sections)


if __name__ == "__main__":
    main()

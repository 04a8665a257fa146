"""Times the Trainer and loops written by hand, on gloo ranks of one machine. See README.md.

python benchmarks/trainer.py --out out/bench-trainer
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import target_line
from ranks import on_ranks, run_ranks, sample
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # for examples/

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.timing import in_turn
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.data import build_dataloader
from torchopt_ext.trainer.train_spec import get_train_spec
from torchopt_ext.trainer.trainer import Trainer

ROOT = Path(__file__).parents[1]
TRAINER, OURS = "Trainer", "loop with FusedAdamW"
TORCH = "loop with torch's clip + fused AdamW"
MODELS = {"demo": 128, "small_tensors": 32, "debug": 64}
"""Sequence lengths by flavor of examples/byte_llama.py."""
CHUNK = 10  # consecutive steps of one contender


# ---- on a rank -----------------------------------------------------------------------------------


def job(flavor: str, folder: str) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = folder
    config.experimental.custom_import = "examples.byte_llama"
    config.model.name, config.model.flavor = "byte_llama", flavor
    training = config.training
    training.device, training.seed, training.mixed_precision_param = "cpu", 1, "float32"
    training.dataset, training.dataset_path = "text", str(ROOT / "docs")
    training.batch_size, training.seq_len, training.steps = 4, MODELS[flavor], 0
    config.parallelism.data_parallel_replicate_degree = int(os.environ["WORLD_SIZE"])
    config.parallelism.data_parallel_shard_degree = 1
    config.activation_checkpoint.mode = "none"
    config.metrics.enable_jsonl, config.metrics.log_freq = False, 10**9
    config.checkpoint.enable_checkpoint, config.checkpoint.interval = True, 10**9
    config.checkpoint.async_mode = "async"
    return config


class Loop:
    """A loop written by hand: forward, backward, clip, AdamW, a schedule, the next batch."""

    def __init__(self, config: JobConfig, ours: bool) -> None:
        spec = get_train_spec("byte_llama")
        args = spec.config[config.model.flavor]
        args.update_from_config(config, None)
        self.model = spec.cls.from_model_args(args)  # type: ignore[attr-defined]
        self.model.init_weights()
        ranks = dist.get_world_size()
        self.forward: nn.Module = DistributedDataParallel(self.model) if ranks > 1 else self.model
        options: dict[str, Any] = {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.ours = ours
        if ours:
            options |= {"max_grad_norm": 1.0, "skip_nonfinite": True}
            self.optimizer: Any = FusedAdamW(self.model.parameters(), **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.loss_fn = spec.build_loss_fn(config)
        self.data: Iterator[Any] = iter(
            build_dataloader(
                dp_world_size=ranks, dp_rank=dist.get_rank(), tokenizer=None, job_config=config
            )
        )

    def __call__(self) -> None:
        for _ in range(CHUNK):
            inputs, labels = next(self.data)
            self.optimizer.zero_grad()
            self.loss_fn(self.forward(inputs["input"]), labels).backward()
            if not self.ours:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()


class ByTrainer:
    """The Trainer, in chunks: its loop ends after each chunk and is entered again."""

    def __init__(self, config: JobConfig) -> None:
        self.trainer, self.config = Trainer(config), config
        self.trainer.checkpointer.load = lambda step=-1: False  # type: ignore[method-assign]
        self._save = self.trainer.checkpointer.save
        # A job's last step is always saved. The last step of a chunk is not.
        self.trainer.checkpointer.save = lambda step, **_: self._save(step)  # type: ignore

    def __call__(self, steps: int = CHUNK) -> None:
        self.config.training.steps += steps
        self.trainer.train()

    def asynchronous_save(self) -> tuple[float, float]:
        """Returns milliseconds that a save stops training, and that a copy of the state takes."""
        self()
        self.config.checkpoint.interval = 1
        stop = harness.wall_milliseconds(lambda: self._save(self.trainer.step))
        self.config.checkpoint.interval = 10**9
        self.trainer.checkpointer._finish_pending(raises=True)
        state = [p.detach() for part in self.trainer.model_parts for p in part.parameters()]
        state += [v for s in self.trainer.optimizers.state.values() for v in s.values()]
        copies: list[torch.Tensor] = []
        return stop, harness.wall_milliseconds(lambda: copies.extend(t.clone() for t in state))

    def growth(self, steps: int) -> float:
        """Returns the process's growth in MiB over ``steps`` steps, after a tenth as warm-up."""
        self(steps // 10)
        before = resident()
        self(steps)
        return (resident() - before) / 2**20


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def on_rank(flavor: str, rounds: int, grows: int, folder: str) -> dict[str, Any]:
    """Times the contenders in turn on a rank; ``grows`` steps of the debug model show leaks."""
    config = job(flavor, folder)
    by_trainer = ByTrainer(config)
    contenders: dict[str, Callable[[], None]] = {
        TRAINER: by_trainer,
        OURS: Loop(config, ours=True),
        TORCH: Loop(config, ours=False),
    }
    for contender in contenders.values():
        contender()
    taken = islice(in_turn(list(contenders.values()), lambda call: sample(call) / CHUNK), rounds)
    times = dict(zip(contenders, zip(*taken, strict=True), strict=True))
    stops, copies = zip(*(by_trainer.asynchronous_save() for _ in range(4)), strict=True)
    grown = by_trainer.growth(grows) if flavor == "debug" else None
    by_trainer.trainer.close()
    over = [a - b for a, b in zip(times[TRAINER], times[OURS], strict=True)]
    return {
        "model": flavor,
        "tensors": sum(1 for _ in by_trainer.trainer.model_parts[0].parameters()),
        "ranks": dist.get_world_size(),
        "milliseconds": {name: statistics.median(taken) for name, taken in times.items()},
        "quartiles": {name: statistics.quantiles(taken)[::2] for name, taken in times.items()},
        "trainer_minus_loop": [statistics.median(over), *statistics.quantiles(over)[::2]],
        "async_save_milliseconds": statistics.median(stops),
        "copy_milliseconds": statistics.median(copies),
        "grown_mib_in_2000_steps": grown,
    }


# ---- all ranks -----------------------------------------------------------------------------------


def start_seconds() -> float:
    """Returns the time from a process's start to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchopt_ext", "train", "--config"]
        command += ["examples/debug.toml", "--training.steps", "1", "--job.dump_folder", folder]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - started


def cells(result: dict[str, Any]) -> tuple[str, ...]:
    median, low, high = result["trainer_minus_loop"]
    taken = [result["milliseconds"][name] for name in (TRAINER, OURS, TORCH)]
    saves = (result["async_save_milliseconds"], result["copy_milliseconds"])
    return (
        *(result["model"], str(result["tensors"]), str(result["ranks"])),
        *(*map("{:.2f}".format, taken), f"{median:.2f} ({low:.2f} to {high:.2f})"),
        *map("{:.2f}".format, saves),
    )


def target_lines(result: dict[str, Any]) -> list[str]:
    """Formats the Trainer's targets, and whether this run met them."""
    taken, name = result["milliseconds"], f"{result['model']}, {on_ranks(result['ranks'])}"
    save, copy = result["async_save_milliseconds"], result["copy_milliseconds"]
    judged = [
        ("ms over a loop by hand", result["trainer_minus_loop"][0], max(2.0, 0.02 * taken[OURS])),
        ("of torch's loop", taken[TRAINER] / taken[TORCH], 1.0),
        ("ms that an async save stops training, copy", save, copy),
    ]
    if (grown := result["grown_mib_in_2000_steps"]) is not None:
        judged.append(("MiB grown in 2,000 steps", grown, 1.0))
    return [target_line(f"{name}: {what}", *of, at_least=False) for what, *of in judged]


def main() -> None:
    parser = harness.parser(__doc__, "bench-trainer", rounds=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    about = harness.start(options)
    grows = 20 if options.quick else 2000
    runs = []
    for ranks in options.ranks:
        for model in options.models:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run_ranks(on_rank, ranks, model, options.rounds, grows, folder))
    start_seconds()  # fills the file cache
    what, seconds = "seconds from a process's start to the end of step 1", start_seconds()
    header = ("model", "tensors", "ranks", "Trainer", "loop", "torch", "over the loop")
    header += ("async save", "copy")
    targets = [line for result in runs for line in target_lines(result)]
    sections = {
        "Milliseconds of a training step, median": harness.table(header, [*map(cells, runs)]),
        "Targets": [*targets, target_line(what, seconds, 10.0, at_least=False)],
    }
    harness.write(options.out / "trainer", about, [], sections, runs=runs)


if __name__ == "__main__":
    main()

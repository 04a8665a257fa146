"""One rank of benchmarks/trainer.py: times the Trainer and loops written by hand in turn."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples/

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.timing import in_turn, seconds_of
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.data import build_dataloader
from torchopt_ext.trainer.train_spec import get_train_spec
from torchopt_ext.trainer.trainer import Trainer

CHUNK = 10  # consecutive steps of one contender


def job(flavor: str, ranks: int, seq_len: int, folder: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.experimental.custom_import = "examples.byte_llama"
    config.model.name, config.model.flavor = "byte_llama", flavor
    training = config.training
    training.device, training.seed, training.mixed_precision_param = "cpu", 1, "float32"
    training.dataset, training.dataset_path = "text", str(Path(__file__).parents[1] / "docs")
    training.batch_size, training.seq_len, training.steps = 4, seq_len, 0
    config.parallelism.data_parallel_replicate_degree = ranks
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

    def asynchronous_saves(self, count: int) -> tuple[list[float], list[float]]:
        """Returns milliseconds that a save stops training, and that a copy of the state takes."""
        stops, copies = [], []
        for _ in range(count):
            self()
            self.config.checkpoint.interval = 1
            started = time.perf_counter()
            self._save(self.trainer.step)
            stops.append(1e3 * (time.perf_counter() - started))
            self.config.checkpoint.interval = 10**9
            self.trainer.checkpointer._finish_pending(raises=True)
            state = [p.detach() for part in self.trainer.model_parts for p in part.parameters()]
            state += [v for s in self.trainer.optimizers.state.values() for v in s.values()]
            started = time.perf_counter()
            copy = [tensor.clone() for tensor in state]
            copies.append(1e3 * (time.perf_counter() - started))
            del copy
        return stops, copies

    def growth(self, steps: int) -> float:
        """Returns the process's growth in MiB over ``steps`` steps, after a tenth as warm-up."""
        self(steps // 10)
        before = resident()
        self(steps)
        return (resident() - before) / 2**20


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(config: JobConfig, rounds: int) -> dict[str, Any]:
    flavor = config.model.flavor
    by_trainer = ByTrainer(config)
    contenders: dict[str, Callable[[], None]] = {
        "Trainer": by_trainer,
        "loop with FusedAdamW": Loop(config, ours=True),
        "loop with torch's clip + fused AdamW": Loop(config, ours=False),
    }
    for contender in contenders.values():
        contender()

    def clock(call: Callable[[], None]) -> float:
        dist.barrier()
        return 1e3 * seconds_of(call, torch.device("cpu")) / CHUNK

    taken = islice(in_turn(list(contenders.values()), clock), rounds)
    times = dict(zip(contenders, zip(*taken, strict=True), strict=True))
    stops, copies = by_trainer.asynchronous_saves(4)
    grown = by_trainer.growth(2000) if flavor == "debug" else None
    by_trainer.trainer.close()
    loop = times["loop with FusedAdamW"]
    over = [a - b for a, b in zip(times["Trainer"], loop, strict=True)]
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


def main() -> None:
    out, flavor, seq_len, rounds = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    result = measure(job(flavor, int(os.environ["WORLD_SIZE"]), seq_len, out.parent), rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A rank of torchtitan_step.py in torchtitan: torchtitan_worker.py OUT [options ...]

torchtitan's Trainer trains, and clips and steps with its own container and with ours in turn.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

OUT = Path(sys.argv.pop(1))  # torchtitan 0.2 reads the arguments when it is imported
ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests/distributed/torchtitan_cpu"), str(ROOT / "examples/torchtitan_0_3")]

if not torch.accelerator.is_available():
    import cpu_shim

    cpu_shim.install()

import torch.distributed as dist  # noqa: E402
from torchtitan.components import optimizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from torchopt_ext import FusedAdam  # noqa: E402

VERSION = importlib.metadata.version("torchtitan")
if VERSION.startswith("0.2."):
    from torchtitan import train as module

    build_optimizers = optimizer.build_optimizers  # before ours replaces it
else:
    from torchtitan import trainer as module

WARM_UP = 4  # steps that create state and plans; torchtitan_step.py adds them
WHAT = ("clip", "step", "clip+step", "training step")
train_step = module.Trainer.train_step


class ByTurns:
    """Replaces the Trainer's container by torchtitan's own and ours over the same parameters."""

    def __init__(self, trainer: Any) -> None:
        ours = trainer.optimizers
        if VERSION.startswith("0.2."):
            stock = build_optimizers(
                trainer.model_parts, trainer.job_config.optimizer, trainer.parallel_dims
            )
        else:
            stock = optimizer.OptimizersContainer(
                trainer.config.optimizer, model_parts=trainer.model_parts
            )
        deferred = dist_utils.clip_grad_norm_  # ours has replaced torchtitan's by it
        self.containers = {"stock": stock, "ours": ours}
        self.clips = {"stock": deferred.__wrapped__, "ours": deferred}
        dist_utils.clip_grad_norm_ = self.clip
        inner = {name: type(each.optimizers[0]) for name, each in self.containers.items()}
        assert not isinstance(stock.optimizers[0], FusedAdam)
        self.classes = {name: f"{cls.__module__}.{cls.__name__}" for name, cls in inner.items()}
        self.sizes = [p.numel() for part in trainer.model_parts for p in part.parameters()]
        self.samples: dict[str, dict[str, list[float]]] = {
            name: {what: [] for what in WHAT} for name in self.containers
        }
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
        whole, _ = milliseconds(train_step, trainer, batches)
        clip, step = self.spent["clip"], self.spent["step"]
        spent = torch.tensor([clip, step, clip + step, whole - self.spent["waiting"]])
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # the slowest rank's
        if self.steps >= WARM_UP:
            for what, value in zip(WHAT, spent.tolist(), strict=True):
                self.samples[self.turn][what].append(value)
        self.steps += 1


def milliseconds(call: Any, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return (time.perf_counter() - start) * 1e3, result


def main() -> None:
    found: list[ByTurns] = []

    def by_turns(trainer: Any, batches: Any) -> None:
        if not found:
            found.append(ByTurns(trainer))
            trainer.optimizers = found[0]
        found[0].train_step(trainer, batches)

    module.Trainer.train_step = by_turns
    if VERSION.startswith("0.2."):
        module.main(module.Trainer)
    else:
        module.time.sleep = lambda seconds: None  # sleeps 2 s at the end, for ranks on other hosts
        importlib.import_module("torchtitan.train").main()
    (turns,) = found
    if os.environ["RANK"] == "0":
        kept = ("samples", "classes", "sizes")
        OUT.write_text(json.dumps({name: getattr(turns, name) for name in kept}))


if __name__ == "__main__":
    main()

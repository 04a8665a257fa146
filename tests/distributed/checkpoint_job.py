"""A small training job with everything that CheckpointManager saves, on any number of ranks."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.compare import difference
from tests.support.ranks import full_tensor
from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer, build_lr_schedulers
from torchopt_ext.trainer.checkpoint import CheckpointManager
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.zero_container import ZeroOptimizersContainer
from torchopt_ext.zero.state_shard import StateShard


class Data:
    """Numbered batches, different on each rank. Each batch adds an entry to the state."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.taken = 0

    def batch(self) -> Tensor:
        self.taken += 1
        generator = torch.Generator().manual_seed(100 * self.taken + self.rank)
        return torch.randn(4, 6, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        history = [("taken", {"in": torch.arange(n)}) for n in range(self.taken)]
        return {f"dp_rank_{self.rank}": {"taken": self.taken, "history": history}, "world": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(())  # the generators must be loaded later
        mine = state.get(f"dp_rank_{self.rank}", {"taken": 0, "history": []})
        assert len(mine["history"]) == mine["taken"]
        self.taken = mine["taken"]


class Job:
    """Model, optimizer, schedule, data and their CheckpointManager, as a Trainer has them.

    Args:
        folder: the job's dump folder.
        seed: the seed of the weights.
        optimizer, arguments: the class of the container's optimizers, and its keyword arguments.
        container: the class of the container.
        kind: "sharded" is FSDP2, "zero" is DDP with sharded optimizer state, "stages" gives each
            rank its own model parts: two on each of two ranks, all four on a single rank.
        data: the data loader.
        settings: fields of the section `checkpoint`, or `steps` of `training`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        optimizer: Any = FusedAdamW,
        arguments: dict[str, Any] | None = None,
        container: Any = OptimizersContainer,
        dtype: torch.dtype = torch.float32,
        kind: str = "",
        data: Any = None,
        ft_manager: Any = None,
        **settings: Any,
    ) -> None:
        config = JobConfig()
        config.job.dump_folder = str(folder)
        config.training.steps = 100
        config.lr_scheduler.warmup_steps = 4
        config.checkpoint.enable_checkpoint = True
        config.checkpoint.interval = 2
        for name, value in settings.items():
            section = config.training if name == "steps" else config.checkpoint
            assert hasattr(section, name), name
            setattr(section, name, value)
        torch.manual_seed(seed)
        self.parts = parts_of(kind, dtype)
        if kind == "zero":
            container = functools.partial(ZeroOptimizersContainer, partition="balanced")
        self.optimizers = container(self.parts, optimizer, {"lr": 0.1, **(arguments or {})})
        self.lr_schedulers = build_lr_schedulers(self.optimizers, config)
        self.data, self.step, self.config = data or Data(), 0, config
        self.manager = CheckpointManager(
            self.data,
            self.parts,
            self.optimizers,
            self.lr_schedulers,
            {"train_state": self},
            config,
            ft_manager,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, until: int) -> Job:
        """Trains as the Trainer's loop does. Every random generator affects the weights."""
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            noise = random.random() + float(np.random.random())
            batch = self.data.batch()
            for part in self.parts:
                for buffer in part.buffers():
                    buffer.add_(1)
                output = part(batch.to(next(part.parameters()).dtype))
                (output.float().square().sum() * noise).backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.manager.save(self.step)
        return self

    def resume(self, step: int = -1) -> Job:
        """Loads a checkpoint, which must be there."""
        assert self.manager.load(step)
        return self

    @property
    def model(self) -> nn.Module:
        """The first part."""
        return self.parts[0]

    def contents(self) -> dict[str, Any]:
        """Returns copies of all values, shards as full tensors. Of ZeRO's state, only settings."""
        model = {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}
        rest = {"step": self.step, "taken": self.data.taken, "lr": self.lr_schedulers.state_dict()}
        entries = model | self.optimizers.state_dict()
        whole = {k: full_tensor(v) for k, v in entries.items() if not isinstance(v, StateShard)}
        return copy.deepcopy(whole) | rest

    def close(self) -> None:
        self.manager.close()


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.LayerNorm(5), nn.Linear(5, 3))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    return model


class Stage(nn.Module):
    """A network whose parameters have names that no other stage has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, network())

    def forward(self, batch: Tensor) -> Tensor:
        [only] = self.children()
        output: Tensor = only(batch)
        return output


def parts_of(kind: str, dtype: torch.dtype) -> list[nn.Module]:
    """Returns the model's parts on this rank."""
    if kind == "stages":
        return [Stage(f"stage{n}") for n in range(4)][dist.get_rank() :: dist.get_world_size()]
    model = network().to(dtype)
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [DistributedDataParallel(model) if kind == "zero" else model]


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Returns the keys whose values differ."""
    keys = sorted(actual.keys() | expected.keys())
    return [key for key in keys if difference(actual.get(key), expected.get(key))]

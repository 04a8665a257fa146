"""One rank of test_containers_resharding.py: saves containers, or loads saved containers.

Usage: resharding_worker.py RESULTS CHECKPOINTS CASES. CASES is JSON.

Every process has a reference: the same model and state, not distributed. The loaded values, and
the values after the next step, must equal the reference bitwise.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.compare import difference
from tests.support.ranks import full_tensor, run_cases
from torchopt_ext import FusedAdamW, FusedMuon
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)
from torchopt_ext.statedict.dcp import load

BLOCKS = 4
CLIPPED = {"max_grad_norm": 0.5}
BF16 = {"state_dtype": torch.bfloat16}
KINDS: dict[str, tuple[torch.dtype, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fp32": (torch.float32, FusedAdamW, CLIPPED),
    "in backward": (torch.float32, FusedAdamW, {}),
    "torch's fp32": (torch.float32, torch.optim.AdamW, {}),
    "bf16": (torch.bfloat16, FusedAdamW, CLIPPED | BF16),
    "masters": (torch.bfloat16, FusedAdamW, CLIPPED | {"master_weights": "fp32"}),
    "remainder": (torch.bfloat16, FusedAdamW, CLIPPED | BF16 | {"master_weights": "remainder"}),
    "remainder8": (torch.bfloat16, FusedAdamW, CLIPPED | {"master_weights": "remainder8"}),
    "torch's bf16": (torch.bfloat16, torch.optim.AdamW, {}),
    "Muon": (torch.float32, FusedMuon, CLIPPED),
}


class Block(nn.Module):
    """Rows are shorter than 64 elements, so the sum of squares is exact in every layout.

    2 to 4 ranks do not divide both 10 and 5 evenly. A fourth rank has no element of the bias.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10, bias=False)
        self.down = nn.Linear(10, 5)
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)


class Model(nn.Module):
    """The blocks with the given numbers."""

    def __init__(self, numbers: range, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(n): Block(BLOCKS * seed + n) for n in numbers})


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def model_parts(layout: str, dtype: torch.dtype, seed: int) -> list[nn.Module]:
    """Returns this rank's parts of a model over all ranks. "alone" is the whole model."""
    ranks, everything = dist.get_world_size(), range(BLOCKS)
    if layout == "pp":  # interleaved
        own = range(dist.get_rank(), BLOCKS, ranks)
        return [Model(range(n, n + 1), seed).to(dtype) for n in own]
    model: nn.Module = Model(everything, seed).to(dtype)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if "tp" in layout:
        plan = {"up": ColwiseParallel(), "norm": SequenceParallel(), "down": RowwiseParallel()}
        mesh = mesh_of(2, ranks // 2)["second"] if "fsdp" in layout else mesh_of(ranks)
        for block in model.blocks.values():
            parallelize_module(block, mesh, plan)
    if "fsdp" in layout:
        mesh = mesh_of(2, ranks // 2)["first"] if "tp" in layout else mesh_of(ranks)
        fully_shard(model, mesh=mesh)
    if layout == "ep":  # as torchtitan: experts on a separate mesh, sharded in both dimensions
        for block in model.blocks.values():
            place(block.up, mesh_of(2, ranks // 2), [Shard(1), Shard(0)])
            for module in (block.norm, block.down):
                place(module, mesh_of(ranks), [Shard(0)])
    if layout == "hsdp":
        fully_shard(model, mesh=mesh_of(2, ranks // 2))
    return [model]


def place(module: nn.Module, mesh: DeviceMesh, placements: list[Shard]) -> None:
    for name, param in module.named_parameters():
        setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))


@functools.cache
def gradients(layout: str, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns gradients, which are the weights of another model in the same layout."""
    return [p.detach() for part in model_parts(layout, dtype, seed) for p in part.parameters()]


class Weights:
    """Saves and loads the weights of all parts as a single model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


class Job:
    def __init__(self, layout: str, kind: str, lr: float = 1e-2) -> None:
        self.layout = layout
        self.dtype, cls, kwargs = KINDS[kind]
        if layout == "pp" and "max_grad_norm" in kwargs:
            kwargs = kwargs | {"process_group": dist.group.WORLD}
        self.parts = model_parts(layout, self.dtype, seed=1)
        in_backward = kind == "in backward"
        container = OptimizersInBackwardContainer if in_backward else OptimizersContainer
        chosen = {"muon": ["up.weight", "down.weight"]} if cls is FusedMuon else {}
        self.optimizer = container(self.parts, cls, {"lr": lr, **kwargs}, **chosen)
        self.lr_scheduler = LRSchedulersContainer(self.optimizer, lambda step: 1 / (step + 1))
        self.saved = {
            "model": Weights(self.parts),
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
        }

    def step(self, seed: int) -> None:
        params = [param for part in self.parts for param in part.parameters()]
        torch.autograd.backward(params, gradients(self.layout, self.dtype, seed))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()

    def values(self) -> dict[str, Any]:
        """Returns copies of all values of a checkpoint, as full tensors."""
        return {
            f"{name}.{key}": copy.deepcopy(full_tensor(value))
            for name, saved in self.saved.items()
            for key, value in saved.state_dict().items()
        }


SAVED, NEXT, OTHER = (3, 4, 5), 6, 7
"""Seeds of gradients: before saving, after loading, and of other training before loading."""


@functools.cache
def reference(saved: str, kept: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of a `kept` container that loaded a `saved` one, and a step later."""
    source, job = Job("alone", saved), Job("alone", kept)
    for seed in SAVED[:steps]:
        source.step(seed)
    for name, value in source.saved.items():
        job.saved[name].load_state_dict(value.state_dict())
    loaded = job.values()
    job.step(NEXT)
    return loaded, job.values()


def compared(job: Job, expected: dict[str, Any]) -> str:
    """Returns the first difference in the values that this rank holds."""
    blocks = range(dist.get_rank(), BLOCKS, dist.get_world_size()) if job.layout == "pp" else None

    def is_here(key: str) -> bool:
        _, _, below = key.partition("blocks.")
        return blocks is None or not below or int(below.split(".")[0]) in blocks

    actual, here = job.values(), {k: v for k, v in expected.items() if is_here(k)}
    if blocks is not None and len(job.parts) > 1:  # one part after the other, with its groups
        actual, here = (dict(sorted(values.items())) for values in (actual, here))
    return difference(actual, here)


def save(folder: Path, layout: str, kind: str, steps: int, mode: str) -> dict[str, str]:
    """Saves and takes a step. The save must not disturb the step, nor the step the save."""
    job = Job(layout, kind)
    for seed in SAVED[:steps]:
        job.step(seed)
    if mode == "async":
        writing = dcp.async_save(job.saved, checkpoint_id=folder, process_group=second_group())
    else:
        dcp.save(job.saved, checkpoint_id=folder)
    job.step(NEXT)
    if mode == "async":
        writing.result()
    return {"difference": compared(job, reference(kind, kind, steps)[1])}


@functools.cache
def second_group() -> Any:
    """Returns a group for saving in the background while the main thread communicates."""
    return dist.new_group()


def resume(
    folder: Path, saved: str, steps: int, layout: str, kept: str, way: str
) -> dict[str, str]:
    job = Job(layout, kept, lr=1.0)
    if way == "after steps":
        job.step(OTHER)
    (dcp.load if way == "in place" else load)(job.saved, checkpoint_id=folder)
    loaded, stepped = reference(saved, kept, steps)
    found = compared(job, loaded)
    job.step(NEXT)
    return {"difference": found or compared(job, stepped).replace("[", "a step later: [", 1)}


def cases() -> dict[str, Callable[[], dict[str, str]]]:
    checkpoints, asked = Path(sys.argv[2]), json.loads(sys.argv[3])
    found: dict[str, Callable[[], dict[str, str]]] = {}
    for action, name, *arguments in asked:
        call = save if action == "save" else resume
        found[f"{action} {name} {arguments}"] = functools.partial(
            call, checkpoints / name, *arguments
        )
    return found


if __name__ == "__main__":
    run_cases(cases)

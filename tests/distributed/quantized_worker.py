"""A rank of an FSDP2 run with moments of 8 bits: saves a checkpoint, or goes on with one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import run_cases
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.statedict.dcp import load

EIGHT_BITS = {"master_weights": "remainder8", "state_dtype": "int8"}
KINDS: dict[str, dict[str, Any]] = {
    "nearest": EIGHT_BITS,
    "stochastic": {**EIGHT_BITS, "stochastic_rounding": True, "rounding_seed": 5},
    "fp32": {"master_weights": "fp32"},
}
folder = Path(sys.argv[1]).parent / "quantized"


class Run:
    """Rows of three groups and a rest, and of one; the ranks' parts are uneven or empty."""

    def __init__(self, kind: str, sharded: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(200, 7), nn.Linear(64, 2)).bfloat16()
        if sharded:
            fully_shard(self.model)
        options = {"lr": 1e-2, "max_grad_norm": 1.0, **KINDS[kind]}
        self.optimizer = OptimizersContainer([self.model], FusedAdamW, options)
        self.saved = {"model": self.model, "optimizer": self.optimizer}

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            if isinstance(param, DTensor):
                placed = (param.device_mesh, param.placements)
                param.grad = distribute_tensor(grad, *placed, src_data_rank=None)  # type: ignore[assignment]
            else:
                param.grad = grad
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        found = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def differing(run: Run, expected: Run) -> list[str]:
    ours, theirs = run.values(), expected.values()
    assert ours.keys() == theirs.keys()
    tensors = [name for name, value in ours.items() if isinstance(value, torch.Tensor)]
    return [name for name in tensors if not torch.equal(ours[name], theirs[name])]


def save(kind: str) -> list[str]:
    run, whole = Run(kind, True), Run(kind, False)
    for seed in (1, 2):
        run.step(seed)
        whole.step(seed)
    dcp.save(run.saved, checkpoint_id=folder / kind)
    return differing(run, whole)


def resume(saved: str, kept: str) -> list[str]:
    source, whole, run = Run(saved, False), Run(kept, False), Run(kept, True)
    for seed in (1, 2):
        source.step(seed)
    for name in whole.saved:
        whole.saved[name].load_state_dict(source.saved[name].state_dict())
    load(run.saved, checkpoint_id=folder / saved)
    found = differing(run, whole)
    run.step(3)
    whole.step(3)
    return found + differing(run, whole)


def cases() -> dict[str, Callable[[], Any]]:
    if dist.get_world_size() == 2:
        return {kind: lambda kind=kind: save(kind) for kind in KINDS}
    pairs = [(kind, kind) for kind in KINDS] + [("fp32", "nearest"), ("nearest", "fp32")]
    return {f"{s} as {k}": lambda s=s, k=k: resume(s, k) for s, k in pairs}


if __name__ == "__main__":
    run_cases(cases)

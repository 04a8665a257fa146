"""A rank of a run with moments of 8 bits, FSDP2's or ZeRO's: saves a checkpoint or resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import run_cases
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from torchopt_ext import FusedAdamW, ZeroRedundancyOptimizer
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.statedict.dcp import load

EIGHT_BITS = {"master_weights": "remainder8", "state_dtype": "int8"}
KINDS: dict[str, dict[str, Any]] = {
    "nearest": EIGHT_BITS,
    "stochastic": {**EIGHT_BITS, "stochastic_rounding": True, "rounding_seed": 5},
    "fp32": {"master_weights": "fp32"},
    "every matrix": {**EIGHT_BITS, "fp32_moments": ()},
    "by name": {**EIGHT_BITS, "fp32_moments": ["0.weight"]},
}
folder = Path(sys.argv[1]).parent / "quantized"


class Run:
    """Rows of three groups and a rest, of one, and of an embedding; the ranks' parts are uneven or
    empty."""

    def __init__(self, kind: str, sharded: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(200, 7), nn.Linear(64, 2), nn.Embedding(5, 70)
        ).bfloat16()
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


class ZeroRun(Run):
    """The same over whole parameters that ranks step for each other, with a short row as well."""

    def __init__(self, kind: str, sharded: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(200, 7), nn.Linear(64, 2), nn.Linear(9, 9), nn.Embedding(5, 70)
        ).bfloat16()
        params, options = self.model.named_parameters(), {"lr": 1e-2, **KINDS[kind]}
        self.optimizer: Any = (
            ZeroRedundancyOptimizer(params, FusedAdamW, max_grad_norm=1.0, **options)
            if sharded
            else FusedAdamW(params, max_grad_norm=1.0, **options)
        )
        self.saved = {"model": self.model, "optimizer": self.optimizer}

    def values(self) -> dict[str, Any]:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() != 0:
            return self.model.state_dict()
        state = self.optimizer.state_dict()["state"]
        entries = {f"{p}.{k}": v for p, entry in state.items() for k, v in entry.items()}
        return {**self.model.state_dict(), **entries}


def differing(run: Run, expected: Run) -> list[str]:
    ours, theirs = run.values(), expected.values()
    assert ours.keys() == theirs.keys()
    tensors = [name for name, value in ours.items() if isinstance(value, torch.Tensor)]
    return [name for name in tensors if not torch.equal(ours[name], theirs[name])]


def save(kind: str, made: type[Run]) -> list[str]:
    run, whole = made(kind, True), made(kind, False)
    for seed in (1, 2):
        run.step(seed)
        whole.step(seed)
    dcp.save(run.saved, checkpoint_id=folder / made.__name__ / kind)
    return differing(run, whole)


def resume(saved: str, kept: str, made: type[Run]) -> list[str]:
    source, whole, run = made(saved, False), made(kept, False), made(kept, True)
    for seed in (1, 2):
        source.step(seed)
    for name in whole.saved:
        whole.saved[name].load_state_dict(source.saved[name].state_dict())
    load(run.saved, checkpoint_id=folder / made.__name__ / saved)
    found = differing(run, whole)
    run.step(3)
    whole.step(3)
    return found + differing(run, whole)


def cases() -> dict[str, Callable[[], Any]]:
    ways = {"FSDP2": Run, "ZeRO": ZeroRun}
    if dist.get_world_size() == 2:
        return {f"{w} {k}": partial(save, k, made) for w, made in ways.items() for k in KINDS}
    others = ("fp32", "every matrix")
    pairs = [(kind, kind) for kind in KINDS]
    pairs += [pair for other in others for pair in ((other, "nearest"), ("nearest", other))]
    return {
        f"{w} {s} as {k}": partial(resume, s, k, made) for w, made in ways.items() for s, k in pairs
    }


if __name__ == "__main__":
    run_cases(cases)

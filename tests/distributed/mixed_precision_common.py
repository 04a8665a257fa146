"""Jobs with given gradients, and comparisons, for the cases of mixed_precision_worker.py.

Gradients are equal at every world size, so sharded and unsharded steps can be compared bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import difference, full_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

# Rows that do not divide evenly, fewer rows than ranks, long rows, vectors, a single element.
SHAPES = [(33, 70), (3, 40), (5,), (1,), (64, 4, 3), (130,)]
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: FusedAdamW(params, lr=1e-2, weight_decay=0.1),
    "remainder": lambda params: FusedAdamW(params, lr=1e-2, master_weights="remainder"),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}
INEXACT = 1e-6  # torch's AdamW rounds the last elements of a shard differently
DYNAMIC = {"initial_scale": 16.0, "growth_interval": 3, "hysteresis": 1, "dtype": torch.float16}


def full_weights(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def full_gradients(step: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def one_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(full: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Tensor:
    return full.clone() if mesh is None else distribute_tensor(full, mesh, placements)


class Job:
    """An optimizer over parameters with given placements, stepped with given gradients."""

    def __init__(
        self,
        base: str,
        dtype: torch.dtype = torch.bfloat16,
        mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] = (Shard(0),),
        **options: Any,
    ) -> None:
        self.dtype, self.mesh, self.placements = dtype, mesh, placements
        self.params = [nn.Parameter(placed(w, mesh, placements)) for w in full_weights(dtype)]
        self.optimizer = FSDPadaptOptimizer(BASES[base](self.params), **options)

    def give(self, step: int) -> None:
        """Sets the gradients of a step, multiplied by the loss scale."""
        scale = self.optimizer.loss_scale.item()
        for param, grad in zip(self.params, full_gradients(step, self.dtype, scale), strict=True):
            param.grad = placed(grad, self.mesh, self.placements)
        self.optimizer._scaled = True

    def step(self, step: int) -> bool:
        self.give(step)
        return bool(self.optimizer.step())

    def run(self, steps: range) -> Job:
        for step in steps:
            self.step(step)
        return self

    def values(self) -> list[Tensor]:
        """Returns weights, masters and moments as full tensors."""
        state = self.optimizer.state_dict()
        tensors = [*self.params, *[w for own in state["flat_fp32_weights"].values() for w in own]]
        for _, entry in sorted(state["base_optim_states"]["state"].items()):
            tensors += [entry[name] for name in sorted(entry) if isinstance(entry[name], Tensor)]
        return [full_tensor(tensor) for tensor in tensors]


def largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference between float32 tensors, which are masters and moments."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a.dtype == torch.float32]
    return max((a - b).abs().max().item() for a, b in pairs)


def assert_alike(base: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts equal bits, and for torch's AdamW values that differ by rounding only."""
    if base == "adamw":
        assert largest(found, expected) < INEXACT
    else:
        assert difference(found, expected) == ""

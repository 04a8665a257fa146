"""Jobs with given gradients, and comparisons, for the cases of mixed_precision_worker.py.

Gradients are equal at every world size, so sharded and unsharded steps can be compared bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.support.compare import difference
from tests.support.ranks import full_tensor
from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

BF16 = torch.bfloat16
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


def random_tensors(seed: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def one_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def layout(kind: str) -> tuple[DeviceMesh, Sequence[Placement]]:
    """Returns the mesh and the placements of "rows", "replicated" or "hybrid" tensors."""
    if kind == "hybrid":
        halves = (2, dist.get_world_size() // 2)
        return init_device_mesh("cpu", halves), [Replicate(), Shard(0)]
    return one_mesh(), [Replicate() if kind == "replicated" else Shard(0)]


class Job:
    """An optimizer over parameters with given placements, stepped with given gradients."""

    def __init__(
        self, base: str, dtype: torch.dtype = BF16, kind: str | None = "rows", **options: Any
    ) -> None:
        """``kind`` is that of :func:`layout`; None for plain tensors."""
        self.dtype, self.layout = dtype, None if kind is None else layout(kind)
        self.params = [nn.Parameter(self.placed(w)) for w in random_tensors(1, dtype)]
        self.optimizer = FSDPadaptOptimizer(BASES[base](self.params), **options)

    def placed(self, full: Tensor) -> Tensor:
        return full.clone() if self.layout is None else distribute_tensor(full, *self.layout)

    def give(self, step: int) -> None:
        """Sets the gradients of a step, multiplied by the loss scale."""
        gradients = random_tensors(100 + step, self.dtype, self.optimizer.loss_scale.item())
        for param, grad in zip(self.params, gradients, strict=True):
            param.grad = self.placed(grad)
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
        return [full_tensor(tensor).clone() for tensor in tensors]


def assert_alike(base: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts equal bits, and for torch's AdamW fp32 values that differ by rounding only."""
    if base != "adamw":
        assert difference(found, expected) == ""
        return
    pairs = zip(found, expected, strict=True)
    assert max((a - b).abs().max() for a, b in pairs if a.dtype == torch.float32) < INEXACT

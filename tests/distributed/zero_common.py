"""What the workers about ZeroRedundancyOptimizer share."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.problems import make_params
from tests.support.ranks import gathered
from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.zero import ZeroRedundancyOptimizer

Params = list[nn.Parameter]
Cases = dict[str, Callable[[], None]]

# One element, odd numbers of elements, several dimensions, a tensor larger than the others.
SHAPES = [(7, 5), (33,), (4, 3, 2), (64, 3), (1,), (129,)]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "FusedAdamW": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedLion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
    "FusedSGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "balanced": {"partition": "balanced", "bucket_elements": 128},
}
SHARDED = {**PARTITIONS["balanced"], "sharded_gradients": True}
ROUNDING = 1e-5  # from averages of equal gradients, and from other orders of summing

_group: Any = None


@contextmanager
def own_group() -> Iterator[None]:
    """Runs a case in a group of its own, so that a rank left waiting does not block other cases."""
    global _group
    _group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group(_group)
        _group = None


def zero_over(params: Any, kind: str = "FusedAdamW", **options: Any) -> Any:
    optimizer_class, defaults = (KINDS | FUSED)[kind]
    return ZeroRedundancyOptimizer(
        params, optimizer_class, **{"process_group": _group, **defaults, **options}
    )


def plain_over(params: Any, kind: str = "FusedAdamW", **options: Any) -> Any:
    optimizer_class, defaults = (KINDS | FUSED)[kind]
    return optimizer_class(params, **{**defaults, **options})


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> Params:
    """Returns parameters that are the same on every rank."""
    return make_params(shapes, dtype)


def groups_of(params: Params, named: bool = False) -> list[dict[str, Any]]:
    """Returns two groups with different settings."""
    items: list[Any] = [(f"p{i}", p) for i, p in enumerate(params)] if named else list(params)
    return [{"params": items[:4], "lr": 0.02}, {"params": items[4:], "weight_decay": 0.0}]


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(70, 70) for _ in range(count)))


def furthest(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest difference between the parameters of two modules."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def whole_state(zero: Any) -> Any:
    """Returns the unsharded state dict, on every rank."""
    zero.consolidate_state_dict()
    return gathered(None if zero.rank else zero.state_dict(), zero.process_group)[0]


@contextmanager
def raises(error: Any, *parts: str) -> Iterator[None]:
    """Asserts that the block raises an error with all parts in its message."""
    with pytest.raises(error) as raised:
        yield
    assert all(part in str(raised.value) for part in parts), raised.value


class Traffic(TorchDispatchMode):
    """Counts the bytes of this rank's tensors by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")
        if name[0] == "c10d":
            tensors = torch.utils._pytree.tree_leaves(args)
            self.bytes[name[1]] += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def held_bytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

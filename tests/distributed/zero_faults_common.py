"""Helpers for the cases of several workers about ZeroRedundancyOptimizer."""

from __future__ import annotations

import datetime
import gc
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import difference
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.zero import ZeroRedundancyOptimizer

Result = dict[str, Any]
Params = list[nn.Parameter]
Cases = dict[str, Callable[[], None]]

SOON = 5  # seconds; a group's timeout is 10, and an error takes well below 1

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
"""Kinds of a few cases: all others of FusedAdamW concern the class that they share."""

PARTITIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "balanced": {"partition": "balanced", "bucket_elements": 128},
}

_group: Any = None


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> Params:
    """Returns parameters that are the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(70, 70) for _ in range(count)))


def furthest(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest difference between the parameters of two modules."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def give_gradients(params: Sequence[Tensor], step: int) -> None:
    """Sets gradients that are the same on every rank and differ in every step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = gradient if param.requires_grad else None


def train(optimizer: Any, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def named_groups(params: Params, named: bool = True) -> list[dict[str, Any]]:
    """Returns two groups with different settings."""
    items: list[Any] = [(f"p{i}", p) for i, p in enumerate(params)] if named else list(params)
    return [{"params": items[:4], "lr": 0.02}, {"params": items[4:], "weight_decay": 0.0}]


@contextmanager
def own_group(seconds: int = 10) -> Iterator[None]:
    """Runs a case in a group of its own, so that a rank left waiting does not block other cases."""
    global _group
    _group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group(_group)
        _group = None


def zero_over(params: Any, kind: str, **options: Any) -> ZeroRedundancyOptimizer:
    optimizer_class, defaults = (KINDS | FUSED)[kind]
    defaults = {"process_group": _group, **defaults}
    return ZeroRedundancyOptimizer(params, optimizer_class, **{**defaults, **options})


def plain_over(params: Any, kind: str, **options: Any) -> Any:
    optimizer_class, defaults = (KINDS | FUSED)[kind]
    return optimizer_class(params, **{**defaults, **options})


def clones(value: Any) -> Any:
    """Returns a copy of nested containers and tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: clones(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(clones(item) for item in value)
    return value


def snapshot(zero: ZeroRedundancyOptimizer) -> Result:
    """Returns copies of all values that a rejected call must not change."""
    local = [p for group in zero.optim.param_groups for p in group["params"]]
    groups = [zero.param_groups, zero.optim.param_groups]
    return clones(
        {
            "settings": [
                [{k: v for k, v in group.items() if k != "params"} for group in of] for of in groups
            ],
            "sizes": [[len(group["params"]) for group in of] for of in groups],
            "state": {i: dict(zero.optim.state.get(p, {})) for i, p in enumerate(local)},
            "params": [p.detach() for group in zero.param_groups for p in group["params"]],
            "control": [block for block, _ in getattr(zero.optim, "_blocks", {}).values()],
            "consolidated": zero._consolidated,
        }
    )


def outcome(call: Callable[[], Any]) -> Result:
    """Returns the call's error and its seconds."""
    start = time.monotonic()
    result: Result = {"raised": "", "message": ""}
    try:
        call()
    except Exception as error:
        result = {"raised": type(error).__name__, "message": str(error)}
    return {**result, "seconds": time.monotonic() - start}


@contextmanager
def raises(error: type[Exception], *parts: str) -> Iterator[None]:
    """Asserts that the block soon raises an error with all parts in its message."""
    begin = time.monotonic()
    with pytest.raises(error) as raised:
        yield
    assert time.monotonic() - begin < SOON
    assert all(part in str(raised.value) for part in parts), raised.value


def assert_same(found: Any, expected: Any) -> None:
    assert difference(found, expected) == ""


def state_dict_of(zero: Any, rank: int, size: int) -> Any:
    """Returns the consolidated state dict on every rank."""
    found = None
    for to in range(size):
        zero.consolidate_state_dict(to)
        if to == rank:
            found = clones(zero.state_dict())
    return found


def reachable_bytes(root: Any, without: Sequence[Tensor]) -> int:
    """Returns the bytes of all tensors that an object keeps alive, except `without`."""
    given = [t for p in without for t in (p, p.grad) if t is not None]
    known = {t.untyped_storage().data_ptr() for t in given}
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        unowned = isinstance(item, type | types.ModuleType | types.FunctionType)
        if id(item) in seen or unowned:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
        else:
            todo += gc.get_referents(item)
    return sum(sizes.values())


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

"""Bits, differences, and what a rejected call must leave unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchopt_ext.optim.control import Controlled, read_fields


def bits(tensor: Tensor) -> bytes:
    """Returns the bytes of a tensor, or of a DTensor's shard, so that NaN and -0.0 compare too."""
    plain = tensor.detach()
    plain = plain.to_local() if isinstance(plain, DTensor) else plain
    return plain.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same_bits(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        assert bits(mine) == bits(other), f"tensor {index}: {mine} and {other}"


def difference(actual: Any, expected: Any, where: str = "") -> str:
    """Describes the first difference in types, key order, dtypes, shapes or bits, or returns ""."""
    if isinstance(expected, Tensor):
        if not isinstance(actual, Tensor):
            return f"{where}: {type(actual).__name__}, expected a tensor"
        kinds = [(t.dtype, tuple(t.shape), t.device) for t in (actual, expected)]
        if kinds[0] != kinds[1]:
            return f"{where}: {kinds[0]}, expected {kinds[1]}"
        flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in (actual, expected)]
        return "" if torch.equal(*flat) else f"{where}: other values"
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or list(actual) != list(expected):
            keys = list(actual) if isinstance(actual, Mapping) else type(actual).__name__
            return f"{where}: {keys}, expected {list(expected)}"
        pairs = [(key, actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return f"{where}: {actual!r}, expected {expected!r}"
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(actual, expected, strict=True))]
    else:
        alike = type(actual) is type(expected) and repr(actual) == repr(expected)
        return "" if alike else f"{where}: {actual!r}, expected {expected!r}"
    return next(filter(None, (difference(a, b, f"{where}[{k!r}]") for k, a, b in pairs)), "")


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts that nested values have the same types, keys, dtypes, shapes and bits."""
    problem = difference(actual, expected)
    assert not problem, problem


def snapshot(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Returns every byte of parameters and their state, to compare two optimizers."""
    content: list[bytes] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            names = sorted(name for name, value in state.items() if isinstance(value, Tensor))
            content += [bits(p), *(name.encode() + bits(state[name]) for name in names)]
    return content


def contents(value: Any) -> Any:
    """Returns a copy of everything that a value holds, for :func:`difference`.

    Of an optimizer these are parameters, gradients, state, groups and control block, of a container
    or a wrapper also those of its optimizers, and of another object its state dict.
    """
    if isinstance(value, Tensor):
        return _content_of_tensor(value)
    if isinstance(value, Mapping):
        return {_name(key): contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(contents, value)) if type(value) in (list, tuple) else repr(value)
    if isinstance(value, nn.Module):
        named = dict(value.named_parameters())
        return contents([value.state_dict(), {name: p.grad for name, p in named.items()}])
    if hasattr(value, "optimizers"):
        return contents([*value.optimizers])
    if isinstance(value, torch.optim.Optimizer):
        return _content_of_optimizer(value)
    return contents(value.state_dict()) if hasattr(value, "state_dict") else repr(value)


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """Asserts that the body changes nothing that the values hold, as :func:`contents` lists it."""
    before = contents(values)
    yield
    assert_same(contents(values), before)


def _name(key: Any) -> Any:
    return id(key) if isinstance(key, Tensor) else key


def _content_of_tensor(tensor: Tensor) -> Any:
    plain = tensor.detach()
    plain = plain.to_local() if isinstance(plain, DTensor) else plain
    if plain.layout is not torch.strided:
        return str(plain.layout), plain.to_dense()
    if type(plain) is not Tensor or plain.is_meta or plain._is_zerotensor():
        return type(plain).__name__, str(plain.device), tuple(plain.shape)
    if plain.numel() and not plain.untyped_storage().nbytes():
        return "freed", tuple(plain.shape)
    return plain.resolve_neg().resolve_conj().clone()


def _content_of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    actual = {
        "params": params,
        "grads": [p.grad for p in params],
        "groups": [
            {key: value if key != "params" else len(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ],
        "state": {key: entry for key, entry in optimizer.state.items() if entry},
        "of the base": getattr(optimizer, "optim", None),
    }
    if isinstance(optimizer, Controlled):
        actual["control"] = {
            str(device): read_fields(block) for device, (block, _) in optimizer._blocks.items()
        }
    return contents(actual)

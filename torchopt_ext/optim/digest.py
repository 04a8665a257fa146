"""Digests of tensors, and of an optimizer's weights and state (docs/numerics.md section 9)."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchopt_ext._arguments import inner_optimizer
from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.algorithms import ALGORITHMS
from torchopt_ext.state.by_row import BY_ROW
from torchopt_ext.state.devices import moved
from torchopt_ext.state.entries import CONTROL_KEY
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import params_of
from torchopt_ext.state.quantized import SCALES
from torchopt_ext.state.storage import EMA, MASTER, REMAINDER, REMAINDER8, place_of

__all__ = ["digest"]

_LEFT_OUT = ("step", CONTROL_KEY, EMA)
_PARAM, _WEIGHT = 0, 4
_STATES = [(k, of) for algorithm in ALGORITHMS.values() for k, of in enumerate(algorithm.states)]
_ROLES = {
    **{state.name: 1 + k for k, state in _STATES},
    **{state.codes: 1 + k for k, state in _STATES},
    **dict.fromkeys((MASTER, REMAINDER, REMAINDER8), _WEIGHT),
    **{state.scale: 1 + _WEIGHT + k for k, state in _STATES},
}
"""The state entries that a digest covers, and their roles."""


def digest(of: Optimizer | Iterable[Tensor]) -> Tensor:
    """Returns a 64-bit digest of each tensor, or of each parameter and its state.

    Digests are equal where all bits are, on every device and with any number of threads. A flipped
    bit changes a digest, and so do exchanged values and another position in the list. Digests of
    shards (DTensor, :class:`ZeroRedundancyOptimizer`) add up to the digest of the whole, modulo
    2**64. ``digest(optimizer).sum()`` is one number for all; nothing is communicated.

    Args:
        of: tensors of any dtype of 1, 2, 4 or 8 bytes (complex128 too), or an optimizer. Of an
            optimizer's parameter, the digest covers weight and moments: the fp32 master weight if
            there is one, otherwise the parameter and its remainder. Averages are left out.

    Returns:
        int64, one element for each tensor, or for each parameter that is trained or has state, in
        the order of the param groups, on the device of the first.

    Raises:
        TypeError: ``of`` is one tensor or a module, or an item is not a tensor.
        ValueError: a DTensor is cut in three dimensions after the first, or is not contiguous; or
            an optimizer keeps an entry of another kind.
        RuntimeError: a tensor has elements of another size, or has no memory.
    """
    if isinstance(of, Tensor | nn.Module):
        raise TypeError(
            f"of is a {type(of).__name__}, expected an optimizer or an iterable of tensors, such "
            f"as model.parameters()"
        )
    arrays = list(_arrays_of(of) if hasattr(of, "param_groups") else _arrays(of))
    if not arrays:
        return torch.zeros(0, dtype=torch.int64)
    by_device: dict[torch.device, list[_Array]] = {}
    for array in arrays:
        by_device.setdefault(array.tensor.device, []).append(array)
    device = arrays[0].tensor.device
    total = torch.zeros(1 + arrays[-1].item, dtype=torch.int64, device=device)
    for there, held in by_device.items():
        if there.type == "meta":
            raise RuntimeError(f"tensor {held[0].item} is on the meta device and has no data")
        digests = torch.zeros(len(held), dtype=torch.int64, device=there)
        numbers = [n for array in held for n in array.numbers]
        torch.ops.torchopt_ext.digest_.default([array.tensor for array in held], numbers, digests)
        items = torch.tensor([array.item for array in held], device="cpu")
        total.index_add_(0, moved(items, device), moved(digests, device))
    return total


class _Array(NamedTuple):
    item: int  # of the result
    tensor: Tensor
    numbers: tuple[int, ...]  # role, row length and place, for csrc/ops/digest.cpp


def _arrays(tensors: Iterable[Tensor]) -> Iterator[_Array]:
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"item {i} is {tensor!r:.200}, expected a tensor")
        yield _Array(i, local_tensor(tensor), (_PARAM, 0, *place_of(i, tensor)))


def _arrays_of(optimizer: Any) -> Iterator[_Array]:
    item = 0
    for inner in _plain_optimizers(optimizer):
        places = getattr(inner, "_parameter_places", {})
        if hasattr(inner, "_wait_for_states"):
            inner._wait_for_states()
        first = getattr(inner, "_first_parameter_number", 0)
        for number, param in enumerate(params_of(inner), first):
            state = inner.state.get(param) or {}
            if not (state or param.requires_grad):
                continue
            place = places.get(param) or place_of(number, param)
            local = local_tensor(param)
            row = local.numel() // max(1, local.shape[0]) if state.keys() & SCALES.keys() else 0
            if hasattr(local, "low_precision_copy"):  # torchopt_ext/fsdp.py
                yield _Array(item, local, (_WEIGHT, row, *place))
            elif MASTER not in state:
                yield _Array(item, local, (_PARAM, row, *place))
            for name, value in state.items():
                if name in BY_ROW:
                    at = place_of(place[0], value)
                    if not is_dtensor(value):  # a part by ZeroRedundancyOptimizer begins at a row
                        first = place[1] * value.numel() // max(1, local.numel())
                        at = place[0], first, 0, 0, 0, 0
                    yield _Array(item, local_tensor(value), (_ROLES[name], 0, *at))
                elif name in _ROLES:
                    yield _Array(item, local_tensor(value), (_ROLES[name], row, *place))
                elif isinstance(value, Tensor) and name not in _LEFT_OUT:
                    raise ValueError(
                        f"state entry {name!r} of parameter {number} has no role in a digest, "
                        f"expected some of {list(_ROLES)}"
                    )
            item += 1


def _plain_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers inside wrappers, containers and ZeroRedundancyOptimizer."""
    optimizer = inner_optimizer(optimizer)
    inside = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optim", None)]
    if inside == [None]:
        yield optimizer
        return
    for inner in inside:
        yield from _plain_optimizers(inner)

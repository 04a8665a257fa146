"""Moving averages of weights (EMA): entries of the state, and their exchange with the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.state.entries import tensor_problem
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.masters import weight_of
from torchopt_ext.state.storage import EMA, Storage

_ELEMENTS = 1 << 20
"""Elements that are in memory twice while weights and averages change places."""


def fit_average(param: Tensor, state: dict[str, Any], storage: Storage) -> None:
    """Adds an average that begins as the weight, or drops one that is not kept."""
    dtype = storage.average_dtype(param)
    if dtype is None:
        state.pop(EMA, None)
    elif EMA not in state:
        state[EMA] = storage.zeros(param, EMA, dtype)
        begin_average(param, state)


def begin_average(param: Tensor, state: dict[str, Any]) -> None:
    """Sets an average to the weight, with the bits of its master or remainder."""
    local_tensor(state[EMA]).copy_(local_tensor(weight_of(param, state)))


@contextmanager
def exchanged(states: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
    """Sets parameters to their averages, and back at the end.

    Where both have one dtype and device, they change places in memory, block by block. Elsewhere
    the weights are kept in copies. Addresses stay: FSDP2's buffers, CUDA graphs and views of the
    parameters see the values.

    Raises:
        ValueError: a program has set an average that does not fit its parameter. Nothing has
            changed.
        RuntimeError: tensors of inference mode cannot change outside it.
    """
    held = [(param, state[EMA]) for param, state in states.items() if EMA in state]
    for param, average in held:
        if problem := tensor_problem(average, param):
            raise ValueError(f"the average of a weight {problem}")
        if not torch.is_inference_mode_enabled() and (
            param.is_inference() or average.is_inference()
        ):
            raise RuntimeError(
                "a weight or its average was made in inference mode: enter it before"
            )
    pairs = [(local_tensor(param), local_tensor(average)) for param, average in held]
    swapped = [(p, e) for p, e in pairs if (p.dtype, p.device) == (e.dtype, e.device)]
    copied = [(p, e) for p, e in pairs if (p.dtype, p.device) != (e.dtype, e.device)]
    kept = [param.detach().clone() for param, _ in copied]
    done: list[tuple[Tensor, Tensor]] = []  # not all, if memory ends before
    try:
        with torch.no_grad():
            for pair in swapped:
                _swap(*pair)
                done.append(pair)
            for param, average in copied:
                param.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for pair in reversed(done):  # averages of two parameters may be one tensor
                _swap(*pair)
            for (param, _), weight in zip(copied, kept, strict=True):
                param.copy_(weight)


def _swap(param: Tensor, average: Tensor) -> None:
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    if not is_dense or param.stride() != average.stride():
        kept = average.clone()
        average.copy_(param)  # first, because an expanded tensor raises
        param.copy_(kept)
        return
    one, other = (torch.as_strided(t.detach(), (t.numel(),), (1,)) for t in (param, average))
    for first in range(0, one.numel(), _ELEMENTS):
        block = slice(first, first + _ELEMENTS)
        kept = one[block].clone()
        one[block] = other[block]
        other[block] = kept

"""Copies of a state in host memory, from which a thread writes while training continues."""

import copy
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import dtensor_of, is_dtensor, local_shard
from torchopt_ext.trainer.saved_values import PLAIN

_FIXED = (*PLAIN, bytes)


class Staged:
    """A copy of nested dictionaries and lists, with their tensors in host memory.

    If tensors are small, torch's stagers (torch/distributed/checkpoint/staging.py) take ten times
    as long as the copy.

    Args:
        state: the state to copy. Subclasses of Tensor other than DTensor need a ``to`` that copies.
        pinned: whether to copy into pinned memory on a separate stream; call :meth:`wait` before
            the tensors change. Otherwise the constructor returns when everything is copied.
    """

    def __init__(self, state: dict[str, Any], *, pinned: bool) -> None:
        self._copied: torch.cuda.Event | None = None
        self._pinned = pinned
        if not pinned:
            self._state = self._copy(state)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._state = self._copy(state)
            self._copied = stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait until everything is copied; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def result(self) -> dict[str, Any]:
        """Returns the copy when it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        found: dict[str, Any] = self._state
        return found

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _FIXED:
            return value
        if kind is dict:
            return {k: v if type(v) in _FIXED else self._copy(v) for k, v in value.items()}
        if kind in (list, tuple):
            return kind(map(self._copy, value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if is_dtensor(value):
            return dtensor_of(self._copy(local_shard(value)), value)
        if kind not in (Tensor, torch.nn.Parameter):
            return value.detach().to("cpu", copy=True)
        source = value.detach()
        host = torch.empty_like(source, device="cpu", pin_memory=self._pinned and source.is_cuda)
        if self._pinned and source.is_cuda:  # else a temporary's memory is reused too early
            source.record_stream(torch.cuda.current_stream())
        return host.copy_(source, non_blocking=self._pinned)

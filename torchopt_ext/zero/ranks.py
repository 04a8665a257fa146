"""The ranks that share one optimizer."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext.optim.collective import waits_at_most

Method = TypeVar("Method", bound=Callable[..., Any])

LARGE = 1 << 20
"""Tensors of so many bytes travel alone."""

STAGING = 16 << 20
"""The most bytes that are packed into one message."""


@dataclass(frozen=True)
class Ranks:
    """A process group as this rank sees it.

    Attributes:
        rank, size: within the group.
        timeout: how long to wait for one of its collectives; None for the group's own timeout.
    """

    group: Any
    rank: int
    size: int
    timeout: timedelta | None = None

    @classmethod
    def of(cls, group: Any, timeout: timedelta | None = None) -> "Ranks":
        group = dist.group.WORLD if group is None else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group), timeout)

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self

    def global_rank(self, rank: int) -> int:
        """The rank in the default group of rank ``rank`` of this group."""
        return dist.get_global_rank(self.group, rank)


def bounded(method: Method) -> Method:
    """``method`` with its waits bounded by the timeout in ``self.ranks``."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waits_at_most(self.ranks.timeout):
            return method(self, *args, **kwargs)

    return cast("Method", wrapper)


def flat_memory(tensor: Tensor) -> Tensor | None:
    """A dense tensor's memory as uint8, whatever the order of its dimensions; None if not dense.

    Every back end sends bytes, whereas gloo and NCCL each lack some dtypes.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Which of the tensors travel together: each large one alone, then the others in order."""
    found = [[tensor] for tensor in tensors if tensor.nbytes >= LARGE]
    room = -1
    for tensor in tensors:
        if tensor.nbytes < LARGE:
            if tensor.nbytes > room:
                found.append([])
                room = STAGING
            found[-1].append(tensor)
            room -= tensor.nbytes
    return found

"""The ranks that share one optimizer."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext.state.collective import DESTROYED, waits_at_most

Method = TypeVar("Method", bound=Callable[..., Any])

RETURNING = "returning the updated parameters (ranks may differ now: load a checkpoint)"
"""What ranks do after a step, for errors."""

LARGE = 1 << 20
"""Tensors of at least this many bytes are sent separately."""

MAX_PACKED_BYTES = 16 << 20
"""The maximum bytes of tensors packed into one message."""


@dataclass(frozen=True)
class Ranks:
    """A process group as this rank sees it."""

    group: Any
    rank: int  # of this process in the group
    size: int
    timeout: timedelta | None = None  # of a collective; None for the group's own

    @classmethod
    def of(cls, group: Any, timeout: timedelta | None = None) -> "Ranks":
        group = dist.group.WORLD if group is None else group
        try:
            rank = dist.get_rank(group)
        except ValueError as error:
            if dist.is_initialized():
                raise RuntimeError(DESTROYED) from error
            raise
        if rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group: build the optimizer on the "
                f"ranks that new_group was given, and train with it only there"
            )
        return cls(group, rank, dist.get_world_size(group), timeout)

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self

    def broadcast(self, tensor: Tensor, rank: int) -> Any:
        """Starts sending a contiguous tensor of a rank, as bytes; returns the work to wait for."""
        memory = tensor.view(torch.uint8)
        return dist.broadcast(memory, group=self.group, group_src=rank, async_op=True)


def bounded(method: Method) -> Method:
    """Decorates a method so that the timeout in ``self.ranks`` bounds its waits."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waits_at_most(self.ranks.timeout):
            return method(self, *args, **kwargs)

    return cast("Method", wrapper)


def flat_memory(tensor: Tensor) -> Tensor | None:
    """Returns a dense tensor's memory as uint8, in any order of dimensions; None if not dense.

    Every backend can send bytes, whereas gloo and NCCL each lack some dtypes.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    # Not detach(): torch makes no view of a tensor without a version counter (inference mode).
    flat = tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups tensors into batches to send: each large tensor separately, then the rest in order."""
    together = [[tensor] for tensor in tensors if tensor.nbytes >= LARGE]
    room = -1
    for tensor in (tensor for tensor in tensors if tensor.nbytes < LARGE):
        if tensor.nbytes > room:
            together.append([])
            room = MAX_PACKED_BYTES
        together[-1].append(tensor)
        room -= tensor.nbytes
    return together

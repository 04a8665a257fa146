"""The ranks that share one optimizer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """A process group as this rank sees it; ``rank`` counts within the group."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> "Ranks":
        group = dist.group.WORLD if group is None else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def global_rank(self, rank: int) -> int:
        """The rank in the default group of rank ``rank`` of this group."""
        return dist.get_global_rank(self.group, rank)


def flat_memory(tensor: Tensor) -> Tensor | None:
    """A dense tensor's memory as uint8, whatever the order of its dimensions; None if not dense.

    Every back end sends bytes, whereas gloo and NCCL each lack some dtypes.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)

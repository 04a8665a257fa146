"""The ranks that share one optimizer, and what befalls them together."""

from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Says which collective failed when a rank of the group died or is late.

        Raises:
            RuntimeError: torch.distributed raised one; that one is its cause.
        """
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{what}: a rank of the group died, is late or does something else (this is rank "
                f"{self.rank} of {self.size}): {error}"
            ) from error


def flat_memory(tensor: Tensor) -> Tensor | None:
    """A dense tensor's memory as uint8, whatever the order of its dimensions; None if not dense.

    Every back end sends bytes, whereas gloo and NCCL each lack some dtypes.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)

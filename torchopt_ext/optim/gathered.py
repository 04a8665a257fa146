"""Sharded state in state dicts, in the form that torch's functions for whole state dicts need."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchopt_ext._torch import layout_of, local_shard


class Handed(DTensor):
    """A view of a sharded entry of an optimizer's state, whose copies and pickles are plain.

    With ``broadcast_from_rank0``, torch's set_optimizer_state_dict copies a whole tensor into this
    rank's shard before anything is checked, unless the shard is on the meta device. Then it makes
    a shard of the whole tensor's dtype (torch/distributed/_state_dict_utils.py,
    _distribute_tensors). So the view says that it is.

    Attributes:
        source: the optimizer's own shard.
    """

    is_meta: Any = True
    source: Any

    @classmethod
    def of(cls, tensor: Any, source: Any = None) -> Any:
        """Returns a view of a DTensor."""
        view: Any = cls(local_shard(tensor), layout_of(tensor), requires_grad=False)
        view.source = local_shard(tensor) if source is None else source
        return view

    def plain(self) -> Any:
        return DTensor(local_shard(self), layout_of(self), requires_grad=False)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a view again: torch offloads what it takes from the optimizer's own state."""
        return Handed.of(self.plain().to(*args, **kwargs), self.source)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers int16 as int32: neither gloo nor NCCL sends int16, also not back."""
        plain = self.plain()
        sent = plain.to(torch.int32) if plain.dtype == torch.int16 else plain
        return sent.redistribute(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

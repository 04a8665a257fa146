"""Sharded remainders that torch can gather with ``full_state_dict=True``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchopt_ext._torch import layout_of, local_shard


class Remainder(DTensor):
    """An int16 DTensor in a state dict, gathered as int32: neither gloo nor NCCL sends int16.

    Copies and pickles of it are plain DTensors.
    """

    @classmethod
    def of(cls, tensor: Any) -> Any:
        """Returns a view of a DTensor."""
        return cls(local_shard(tensor), layout_of(tensor), requires_grad=False)

    def plain(self) -> Any:
        return DTensor(local_shard(self), layout_of(self), requires_grad=False)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain().to(torch.int32).redistribute(*args, **kwargs).to(torch.int16)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

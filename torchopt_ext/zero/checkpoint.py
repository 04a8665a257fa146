"""Distributed checkpoints (torch.distributed.checkpoint, DCP) of a sharded optimizer.

Every rank writes and reads its own parts only. A checkpoint has the keys and shapes of the
unsharded optimizer's, so any world size, either partition and the unsharded optimizer can load it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader

from torchopt_ext.optim.collective import all_or_none
from torchopt_ext.statedict import dcp
from torchopt_ext.statedict.dcp_metadata import Path, Reader
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.ranks import bounded
from torchopt_ext.zero.sharded import ShardedOptimizer
from torchopt_ext.zero.state import local_parts, local_state, packed
from torchopt_ext.zero.state_shard import StateShard


@bounded
def sharded_state_dict(zero: ShardedOptimizer) -> dict[str, Any]:
    """This rank's part of a ZeroRedundancyOptimizer's state dict; call it on all ranks.

    ``dcp.save({"optimizer": zero}, checkpoint_id=...)`` saves the same. Here all ranks learn of it
    if one has an entry that DCP would not give back.

    Raises:
        TypeError: DCP would not give back an entry as it is; names it.
        ValueError: so it is on another rank; names the rank and the entry.
    """
    with all_or_none(zero.process_group):
        return sharded(zero, elsewhere=False)


def sharded(zero: ShardedOptimizer, *, elsewhere: bool) -> dict[str, Any]:
    """This rank's part of the state dict, with StateShards for tensors. No other rank takes part.

    Args:
        elsewhere: another rank gives the whole tensors to DCP.

    Raises:
        TypeError: DCP would not give back an entry as it is; names it.
    """
    zero._check_overlap_initialized()
    pieces, extra = local_state(zero)
    state = {
        index: {name: joined(of_name, elsewhere) for name, of_name in own.items()}
        for index, own in sorted(pieces.items())
    }
    # Every rank's first parameter has the control block's fields, which all ranks read.
    result: dict[str, Any] = dcp.storable(packed(zero, state, extra))
    return result


def joined(pieces: Sequence[tuple[Part, Any]], elsewhere: bool = False) -> Any:
    """One value for DCP of an entry of all of this rank's parts of a parameter."""
    part, value = pieces[0]
    cut = part.divides(value) or not part.divided
    if isinstance(value, Tensor) and value.dim() and cut:
        return StateShard.of(pieces, elsewhere)
    return value


@bounded
@torch.no_grad()
def load_sharded(
    zero: ShardedOptimizer,
    checkpoint: str | os.PathLike[str] | StorageReader,
    key: str = "optimizer",
    process_group: Any = None,
) -> None:
    """``load({key: zero})`` of :mod:`torchopt_ext.statedict.dcp`; call it on all ranks.

    Args:
        zero: the ZeroRedundancyOptimizer.
        checkpoint: a folder, or a reader of another storage.
        key: where the optimizer's state dict is in what was saved.
        process_group: the ranks that call this; those of the optimizer by default.

    Raises:
        ValueError: on all ranks, if groups, shapes or keys do not fit; names the parameter or key.
        RuntimeError: on all ranks, if one cannot read its parts.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else Reader(checkpoint)
    group = zero.process_group if process_group is None else process_group
    dcp.load({key: zero}, storage_reader=reader, process_group=group)


def buffers(zero: ShardedOptimizer, ids: list[str]) -> dcp.Buffers:
    """What this rank reads: of its own parameters their parts, of others nothing."""
    zero._check_overlap_initialized()
    of_id = zip(ids, zero._all_params, strict=False)
    params: dict[Path, Tensor] = {("state", i): param for i, param in of_id}
    parts: dict[Tensor, list[Part]] = {}
    for part in local_parts(zero):
        parts.setdefault(part.param, []).append(part)

    def buffer(path: Path, like: Tensor) -> Tensor:
        param = params.get(path[:2])
        if param is not None and param not in parts and len(path) == 3:
            return like
        if param is None or path[-1] == "step" or like.shape != param.shape or len(path) > 3:
            return torch.empty(like.shape, dtype=like.dtype)
        own = parts[param]
        return joined([(p, torch.empty_like(p.tensor, dtype=like.dtype)) for p in own])

    return buffer

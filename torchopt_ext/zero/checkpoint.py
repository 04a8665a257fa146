"""Distributed checkpoints (DCP) of a ZeroRedundancyOptimizer, checked on all ranks together."""

import os
from typing import Any

import torch
from torch.distributed.checkpoint.storage import StorageReader

from torchopt_ext.state.collective import fail_together
from torchopt_ext.statedict import dcp
from torchopt_ext.zero.optimizer import ZeroRedundancyOptimizer
from torchopt_ext.zero.ranks import bounded
from torchopt_ext.zero.state import sharded


@bounded
def sharded_state_dict(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Returns what ``dcp.save({"optimizer": zero})`` saves of this rank. Call it on all ranks.

    Raises:
        TypeError: DCP would not restore an entry of this rank unchanged; names the entry.
        ValueError: another rank has such an entry; names the rank and the entry.
    """
    with fail_together(zero.process_group):
        return sharded(zero.local, consolidated=False)


@bounded
@torch.no_grad()
def load_sharded(
    zero: ZeroRedundancyOptimizer,
    checkpoint: str | os.PathLike[str] | StorageReader,
    key: str = "optimizer",
) -> None:
    """Loads a distributed checkpoint as ``torchopt_ext.statedict.dcp.load({key: zero})`` does.

    Args:
        checkpoint: a folder, or a reader of another storage.
        key: the key under which the optimizer was saved.

    Raises:
        ValueError: groups, shapes or keys do not fit; all ranks raise, naming the parameter or key.
        RuntimeError: a rank cannot read its parts. All ranks raise.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else dcp.Reader(checkpoint)
    dcp.load({key: zero}, storage_reader=reader, process_group=zero.process_group)

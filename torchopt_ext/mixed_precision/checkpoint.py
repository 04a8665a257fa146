"""Checkpoints of an FSDPadaptOptimizer on disk, which another number of ranks can load.

A folder is replaced as a whole: whenever the job dies, the old or the new checkpoint exists.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.collective import fail_together, raise_together
from torchopt_ext.statedict.dcp import Reader, group_of, load, storable
from torchopt_ext.statedict.folders import publish, recover

if TYPE_CHECKING:
    from torchopt_ext.mixed_precision.fsdp_optimizer import FSDPadaptOptimizer

KEY = "optimizer"
CHECKPOINT_FILES = re.compile(r"\.metadata|__\d+_\d+\.distcp|_rank\d+")
SAVING = ".saving"


def save_checkpoint(
    optimizer: FSDPadaptOptimizer, folder: str | os.PathLike[str], process_group: Any = None
) -> None:
    """Saves an optimizer to a folder, which is replaced as a whole. Call it on all ranks.

    It calls ``dcp.save({"optimizer": optimizer})``. Each rank writes its shards of DTensors. One
    rank writes plain tensors, as replicas. The old checkpoint stays usable until all is written.

    Args:
        folder: a folder on a disk that all ranks share.
        process_group: the ranks that call this; by default all ranks.

    Raises:
        ValueError: plain parameters are shards on the ranks of a process group. Save each rank's
            state dict instead.
        TypeError: a value in the state would not load again; names its key.
        FileExistsError: ``folder`` has other files.
        RuntimeError: a rank cannot write; all ranks raise.
    """
    group = group_of(process_group)
    rank = 0 if group is None else dist.get_rank(group)
    folder = Path(folder).resolve()  # replace the folder, not a link to it
    saving = folder.with_name(folder.name + SAVING)
    with fail_together(group):
        plain = not all(is_dtensor(p) for group in optimizer.params_by_group for p in group)
        if plain and optimizer.process_group is not None:
            raise ValueError(
                "plain parameters of an optimizer with a process_group are shards, whose places in "
                "the whole are not known: save each rank's state_dict()"
            )
        states = storable(optimizer.state_dict())
        if rank == 0:
            recover(folder)
            reject_other_files(folder)
            shutil.rmtree(saving, ignore_errors=True)
    error = None
    try:
        save({KEY: states}, checkpoint_id=saving, process_group=group, no_dist=group is None)
    except (Exception, CheckpointException) as problem:
        error = f"saving the optimizer: {problem}"
    raise_together(error, group)
    with fail_together(group):
        if rank == 0:
            publish(saving, folder)


def reject_other_files(folder: Path) -> None:
    """Raises FileExistsError if replacing the checkpoint would delete something else."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file")
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in files if not CHECKPOINT_FILES.fullmatch(name)]
    if ".metadata" in files:
        entries = Reader(folder).read_metadata().state_dict_metadata
        others += [name for name in entries if not name.startswith(f"{KEY}.")]
    if others:
        raise FileExistsError(
            f"{folder}, which is replaced as a whole, has '{others[0]}' beside the optimizer's "
            f"checkpoint: give the optimizer a folder of its own"
        )


def load_checkpoint(
    optimizer: FSDPadaptOptimizer, folder: str | os.PathLike[str], process_group: Any = None
) -> None:
    """Loads a checkpoint of :func:`save_checkpoint` or LightRFT's ``save_ckpt``, on all ranks.

    :func:`torchopt_ext.statedict.dcp.load` loads the former on any number of ranks. LightRFT's
    files, ``_rank0`` and so on, need as many ranks as wrote them. Everything is read and checked
    before anything changes. No code in the files runs.

    Raises:
        AssertionError, ValueError: something does not fit; all ranks raise and name it.
        RuntimeError: a rank cannot read; all ranks raise.
    """
    group = group_of(process_group)
    rank = 0 if group is None else dist.get_rank(group)
    folder = Path(folder).resolve()
    with fail_together(group):
        if rank == 0:
            recover(folder)
    with fail_together(group):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {folder}")
    if (folder / ".metadata").is_file():
        load({KEY: optimizer}, checkpoint_id=folder, process_group=group)
        return
    path = folder / f"_rank{rank}"
    with fail_together(group):
        try:
            states = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise RuntimeError(f"reading {path}: {type(error).__name__}: {error}") from error
        load_checked = optimizer._prepare_load(states)
    with fail_together(group):
        load_checked()

"""Where checkpoints lie, which of them are whole, and a fingerprint of what they hold."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def is_complete(checkpoint: Path) -> bool:
    """torch.distributed.checkpoint renames .metadata into place once every rank has written."""
    return (checkpoint / ".metadata").is_file()


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return max(filter(is_complete, folder.glob("step-*")), default=None)


def fingerprint(*state_dicts: Mapping[str, Any]) -> str:
    """sha256 of every tensor's name, dtype, shape and bytes in flat state dicts, by name.

    Raises RuntimeError if the ranks differ: data-parallel replicas are equal to the last bit.
    """
    sha = hashlib.sha256()
    for state_dict in state_dicts:
        for name, value in sorted(state_dict.items()):
            if isinstance(value, Tensor):
                sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    if dist.is_initialized():
        mine = torch.frombuffer(bytearray(sha.digest()), dtype=torch.uint8)
        first = mine.clone()
        dist.broadcast(first, src=0)
        if not mine.equal(first):
            raise RuntimeError(f"rank {dist.get_rank()} holds other weights or state than rank 0")
    return sha.hexdigest()

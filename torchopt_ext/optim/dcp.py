"""Reading the entries of a distributed checkpoint (torch.distributed.checkpoint, DCP).

Whose state dict it is and of how many ranks does not matter; nothing but plain values is unpickled.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from torchopt_ext._torch import unflatten_state_dict
from torchopt_ext.optim.agreement import agree

Path = tuple[str | int, ...]
"""Keys and list positions that lead to an entry of a nested state dict."""


class Saved(NamedTuple):
    """An entry of a checkpoint: where it belongs in the state dict, and what DCP knows of it."""

    path: Path
    stored: Any


def saved_entries(reader: StorageReader, key: str, expected: str, group: Any) -> dict[str, Saved]:
    """The entries below ``key`` by their DCP keys, in the order of the state dict.

    Args:
        expected: a key that a state dict of the right kind has.
        group: the ranks that call this; None if there is no other.

    Raises:
        RuntimeError: on all ranks, if one cannot read the checkpoint's metadata.
        ValueError: there is no optimizer's state dict at ``key``, or some elements are missing.
    """
    error = None
    try:
        found = reader.read_metadata()
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = f"reading the metadata of the checkpoint: {type(problem).__name__}: {problem}"
    agree(error, group)
    entries: dict[str, Saved] = {}
    paths: Mapping[str, Path] = found.planner_data or {}
    for fqn, path in paths.items():
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == key), None)
        if depth is not None and fqn in found.state_dict_metadata:
            entries[fqn] = Saved(tuple(path[depth:]), found.state_dict_metadata[fqn])
    if not any(entry.path[0] == expected for entry in entries.values()):
        tops = sorted({str(path[0]) for path in paths.values()})
        raise ValueError(f"the checkpoint has no '{key}.{expected}'; it has {tops}")
    for fqn, (_, stored) in entries.items():
        if isinstance(stored, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != stored.size.numel():
                raise ValueError(
                    f"'{fqn}' is incomplete: the checkpoint has {held} of its "
                    f"{stored.size.numel()} elements, so not all ranks saved theirs"
                )
    return entries


def without_memory(entry: Saved) -> Any:
    """What has an entry's shape and dtype, to check entries that other ranks read."""
    stored = entry.stored
    if not isinstance(stored, TensorStorageMetadata):
        return 0
    return torch.zeros((), dtype=stored.properties.dtype).expand(stored.size)


def nested(values: Mapping[str, Any], entries: Mapping[str, Saved]) -> dict[str, Any]:
    """Values by DCP key as the state dict they are of, in the order of ``entries``."""
    paths = {fqn: entry.path for fqn, entry in entries.items()}
    return unflatten_state_dict({fqn: values[fqn] for fqn in paths}, paths)


class _Planner(DefaultLoadPlanner):
    """Takes DCP keys as they are, and unpickles plain values only, where torch's runs any code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(
    values: dict[str, Any], reader: StorageReader, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Fills tensors, and replaces None by values, all by their DCP keys; returns ``values``."""
    try:
        load(
            values,
            storage_reader=reader,
            planner=_Planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # a BaseException, which callers would not expect
        found = [f"rank {rank}: {problem!r}" for rank, (problem, _) in error.failures.items()]
        raise RuntimeError(f"reading the optimizer state: {'; '.join(found)}") from error
    return values

"""Optimizers in distributed checkpoints (torch.distributed.checkpoint, DCP).

``dcp.save({"optim": optimizer}, checkpoint_id=folder)`` saves every optimizer of this package;
:func:`load` loads it. ``dcp.load`` would read into the optimizer's own tensors, before anything is
checked, and only what the optimizer has already.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchopt_ext._torch import set_element, unflatten_state_dict
from torchopt_ext.optim.collective import agree, all_or_none
from torchopt_ext.statedict.dcp_metadata import Path, Reader, Saved, entries_below
from torchopt_ext.statedict.masters import zeros_like

Buffers = Callable[[Path, Tensor], Tensor | None]
"""What to read an entry into, given its path and a tensor of its shape without memory.

The parameters' indices in a path are numbers, by order. The tensor itself stands for an entry that
is to be checked but not read; None leaves the entry out.
"""


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """``dcp.load`` that changes no optimizer before its entries are read and checked.

    Call it on all ranks. Each reads its own parts, so the checkpoint may be from another number of
    ranks, from another optimizer of this package or from torch's; docs/containers.md says what is
    converted. Optimizers come first; other objects, and optimizers whose state dicts have a layout
    of their own, follow as with ``dcp.load``, in place. Pickled values are to be plain values: no
    code of the files runs.

    Args:
        state_dict: optimizers, modules and other objects by key, as they were saved.
        checkpoint_id: a folder.
        storage_reader: of another storage. Only :class:`Reader` reads ``.metadata`` safely.
        process_group: the ranks that call this; all by default.
        no_dist: this process alone reads.

    Raises:
        ValueError: on all ranks, if an optimizer is not in the checkpoint or does not fit; names
            what.
        RuntimeError: on all ranks, if one cannot read.
    """
    group = None if no_dist else group_of(process_group)
    reader = reader_of(checkpoint_id, storage_reader)
    optimizers = {key: value for key, value in state_dict.items() if isinstance(value, Optimizer)}
    loaded = read_optimizers(optimizers, reader, group) if optimizers else {}
    for key, states in loaded.items():
        with all_or_none(group):
            optimizers[key].load_state_dict(states)
    others = {key: value for key, value in state_dict.items() if key not in loaded}
    if others:
        read(others, reader, group, "the checkpoint", nested=True)
        state_dict.update(others)


def group_of(process_group: Any) -> Any:
    """The group to communicate in; None for a single process."""
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group


def reader_of(checkpoint: Any, reader: StorageReader | None) -> StorageReader:
    if reader is None:
        if checkpoint is None:
            raise ValueError("load() needs a checkpoint_id or a storage_reader")
        return Reader(checkpoint)
    if checkpoint is not None:
        reader.reset(checkpoint)
    return reader


def read_optimizers(
    optimizers: Mapping[str, Optimizer], reader: StorageReader, group: Any
) -> dict[str, dict[str, Any]]:
    """The optimizers' state dicts as a checkpoint has them, in memory of their own.

    Without those of other packages' optimizers whose layout is not known.
    """
    error = None
    try:
        metadata = reader.read_metadata()
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = f"reading the metadata of the checkpoint: {type(problem).__name__}: {problem}"
    agree(error, group)
    entries = {key: entries_below(metadata, key) for key in optimizers}
    entries = {k: own for k, own in entries.items() if layout_known(optimizers[k], own.values())}
    saved = {fqn: entry for own in entries.values() for fqn, entry in own.items()}
    what = "the optimizer state"
    values = {fqn: None for fqn, entry in saved.items() if entry.like is None}
    found: dict[str, Any] = read(values, reader, group, what)
    unread: dict[str, Tensor] = {}
    with all_or_none(group):
        for key, own in entries.items():
            ids = ids_of(nested(found, own))
            numbers = {text: number for number, text in enumerate(ids)}
            buffers = buffers_of(optimizers[key])
            for fqn, entry in own.items():
                if (like := entry.like) is None:
                    continue
                buffer = buffers(numbered(entry.path, numbers), like)
                if buffer is like:
                    unread[fqn] = like
                elif buffer is not None:
                    found[fqn] = buffer
    tensors = {fqn: value for fqn, value in found.items() if saved[fqn].like is not None}
    found |= read(tensors, reader, group, what) | unread
    return {key: with_ids(nested(found, own)) for key, own in entries.items()}


# ---- where entries go ----------------------------------------------------------------------------


def layout_known(optimizer: Optimizer, entries: Iterable[Saved]) -> bool:
    """Whether the optimizer says where entries go, or they are those of torch's state dicts."""
    if hasattr(optimizer, "checkpoint_buffers"):
        return True
    groups = [e.path for e in entries if len(e.path) > 2 and e.path[0] == "param_groups"]
    return any(isinstance(path[1], int) for path in groups)


def buffers_of(optimizer: Optimizer) -> Buffers:
    """The optimizer's own ``checkpoint_buffers()``, or those of torch's indexed state dicts."""
    if own := getattr(optimizer, "checkpoint_buffers", None):
        buffers: Buffers = own()
        return buffers
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return lambda path, like: indexed_buffer(params, path, like)


def indexed_buffer(params: list[Tensor], path: Path, like: Tensor) -> Tensor:
    """For an entry of a state dict in torch's layout: ``state``, index, name."""
    at = path[1] if path[0] == "state" else None
    known = isinstance(at, int) and at < len(params)
    return buffer_like(params[at] if known else None, path, like)  # type: ignore[index]


def named_buffers(params: Mapping[str, Tensor]) -> Buffers:
    """For flat state dicts (:mod:`flat`), without the entries of other parameters."""

    def buffer(path: Path, like: Tensor) -> Tensor | None:
        kind, _, key = ".".join(map(str, path)).partition(".")
        fqn, _, name = key.rpartition(".")
        if kind == "state" and fqn not in params:
            return None
        return buffer_like(params.get(fqn), (name,), like)

    return buffer


def buffer_like(param: Tensor | None, path: Path, like: Tensor) -> Tensor:
    """Memory for an entry: placed as the parameter if shaped so, otherwise on the host."""
    if param is None or path[-1] == "step" or like.shape != param.shape:
        return torch.empty(like.shape, dtype=like.dtype)
    return zeros_like(param.detach(), like.dtype)


def nested(values: Mapping[str, Any], entries: Mapping[str, Saved]) -> dict[str, Any]:
    """Values by DCP key as the state dict they are of, in the order of ``entries``."""
    paths = {fqn: entry.path for fqn, entry in entries.items() if fqn in values}
    return unflatten_state_dict({fqn: values[fqn] for fqn in paths}, paths)


def indexed(states: Mapping[str, Any]) -> list[Any]:
    """The indexed state dicts in a state dict: itself, or that of a base optimizer."""
    return [s for s in (states, *states.values()) if isinstance(s, Mapping) and "param_groups" in s]


def ids_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters' indices or names, by the text DCP made of them."""
    return {str(i): i for s in indexed(states) for g in s["param_groups"] for i in g["params"]}


def numbered(path: Path, numbers: Mapping[Any, int]) -> Path:
    """A path with the place of the parameter instead of what the checkpoint calls it."""
    for at in (1, 2):
        if len(path) > at + 1 and path[at - 1] == "state" and path[at] in numbers:
            return (*path[:at], numbers[path[at]], *path[at + 1 :])
    return path


def with_ids(states: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the keys of ``state`` as its groups have them."""
    ids = ids_of(states)
    for own in indexed(states):
        own["state"] = {ids.get(key, key): entry for key, entry in own.get("state", {}).items()}
    return states


# ---- reading -------------------------------------------------------------------------------------


class _Planner(DefaultLoadPlanner):
    """Unpickles plain values only, where torch's planner runs any code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
        else:
            self.state_dict[fqn] = loaded


def read(
    values: dict[str, Any], reader: StorageReader, group: Any, what: str, *, nested: bool = False
) -> dict[str, Any]:
    """Fills tensors and replaces other values, by their DCP keys unless ``nested``."""
    planner = _Planner(flatten_state_dict=nested, flatten_sharded_tensors=nested)
    alone = group is None
    try:
        load_in_place(
            values, storage_reader=reader, planner=planner, process_group=group, no_dist=alone
        )
    except CheckpointException as error:  # a BaseException, which callers would not expect
        found = [f"rank {rank}: {problem!r}" for rank, (problem, _) in error.failures.items()]
        raise RuntimeError(f"reading {what}: {'; '.join(found)}") from error
    return values


# ---- saving --------------------------------------------------------------------------------------


INDEXED = ("state", "base_optim_states.state", "flat_fp32_weights")
"""Where state dicts have indices as keys."""


def storable(value: Any, where: str = "") -> Any:
    """A state dict with numpy's numbers as Python's, if DCP gives it back as it is.

    Raises:
        TypeError: a value is neither a dense tensor nor plain, or a key is no string; names it.
    """
    if isinstance(value, Tensor):
        dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        checkpointable = isinstance(value, DTensor) or hasattr(value, "__create_write_items__")
        if not (dense or checkpointable) or value.is_meta:
            raise TypeError(
                f"{where} is a {type(value).__name__} of layout {value.layout} on {value.device}; "
                f"expected a dense tensor"
            )
        return value
    if isinstance(value, Mapping):
        for key in value:
            # DCP makes text of keys, which is undone for indices of parameters and groups only.
            if not isinstance(key, str) and where not in INDEXED:
                raise TypeError(f"{where} has the key {key!r}, expected strings as keys")
        return {k: storable(item, f"{where}.{k}".lstrip(".")) for k, item in value.items()}
    if isinstance(value, list | tuple):
        items = [storable(item, f"{where}.{n}") for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    kind: Any
    for kind in (bool, int, float, complex, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, torch.dtype | torch.device):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, expected a plain value")

"""Optimizers in distributed checkpoints (torch.distributed.checkpoint, DCP).

``dcp.save({"optim": optimizer}, checkpoint_id=folder)`` saves any optimizer of this package, and
:func:`load` loads it. ``dcp.load`` would read into the optimizer's own tensors before anything is
checked, and would read only entries that the optimizer already has.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchopt_ext._torch import file_system_of, set_element
from torchopt_ext.state.collective import fail_together, raise_together
from torchopt_ext.state.entries import BY_INDEX, BY_NAME, REQUIRED, WITH_BASE, required_of
from torchopt_ext.state.params import params_of
from torchopt_ext.state.quantized import SCALES, can_quantize, scales_like
from torchopt_ext.statedict.loaded import load_whole, raise_problems, read_indexed

__all__ = ["Reader", "load"]

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list positions that lead to an entry of a nested state dict."""
Entries: TypeAlias = dict[str, tuple[Path, Tensor | None]]
"""The path of each entry by DCP's key, and a tensor of its shape and dtype without memory.

The tensor is None for other values.
"""
Buffers: TypeAlias = Callable[[Path, Tensor], Tensor | None]
"""A function that returns the buffer for an entry, given its path and a tensor without memory.

If it returns the given tensor, the entry is checked but not read. None leaves the entry out. An
optimizer may have its own, by a method ``_checkpoint_buffers(ids)`` that takes the checkpoint's ids
of its parameters, in order. If an optimizer has an attribute ``_checkpoint_layout`` (a layout of
entries.py), state dicts of another layout are rejected.
"""
BASE = "base_optim_states"
"""The key of the base's state dict, with torch's layout, in FSDPadaptOptimizer's state dict."""


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads like ``dcp.load``, but reads and checks an optimizer's entries before changing it.

    Call it on all ranks. The checkpoint may be from another number of ranks, or from another
    optimizer of the same layout, torch's included; docs/checkpoints.md says what is converted.
    Optimizers come first: if one does not fit on one rank, nothing changes on any, except that
    parameters may have got state of step 0. (Optimizers that cannot check first, such as
    ZeroRedundancyOptimizer, are checked when those before them have been loaded.) Other objects,
    and optimizers of unknown layouts, come last and are loaded in place, as with ``dcp.load``.
    Pickled values must be plain values: no code of the files runs.

    Args:
        state_dict: optimizers, modules and other objects by key, as they were saved.
        checkpoint_id: a folder, or its URL for fsspec, such as ``s3://bucket/step-5``.
        storage_reader: a reader of another storage; only :class:`Reader` reads metadata safely.
        process_group: the ranks that call this function; all by default.
        no_dist: whether this process alone reads.

    Raises:
        ValueError: on all ranks, if an optimizer is not in the checkpoint, has another layout there
            or does not fit; the message names the problem.
        KeyError: the checkpoint lacks a parameter of a container; other ranks raise ValueError.
        RuntimeError: on all ranks, if a rank cannot read.
    """
    group = None if no_dist else group_of(process_group)
    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("load() needs a checkpoint_id or a storage_reader")
        storage_reader = Reader(checkpoint_id)
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    optimizers = {key: value for key, value in state_dict.items() if isinstance(value, Optimizer)}
    loaded = read_optimizers(optimizers, storage_reader, group) if optimizers else {}
    with fail_together(group):
        checked = [prepare_load(optimizers[key], states) for key, states in loaded.items()]
    for load_checked in checked:
        with fail_together(group):
            load_checked()
    others = {key: value for key, value in state_dict.items() if key not in loaded}
    if others:
        read(others, storage_reader, group, "the checkpoint")
        state_dict.update(others)


def prepare_load(optimizer: Optimizer, states: dict[str, Any]) -> Callable[[], None]:
    """Checks a state dict, and returns the function that loads it.

    An optimizer checks in its method ``_prepare_load``. Without it, or if a subclass overrides only
    ``load_state_dict``, the returned function checks.
    """
    if type(optimizer) in REQUIRED:  # torch's classes, which check less
        raise_problems(read_indexed(states, optimizer.param_groups).problems(optimizer))
        return partial(load_whole, optimizer, states)
    both = {"load_state_dict", "_prepare_load"}
    first = next(vars(kind) for kind in type(optimizer).__mro__ if both & vars(kind).keys())
    if "_prepare_load" not in first:
        return partial(optimizer.load_state_dict, states)
    load_checked: Callable[[], None] = optimizer._prepare_load(states)  # type: ignore[attr-defined]
    return load_checked


@contextmanager
def quiet() -> Iterator[None]:
    """Silences DCP's warning that a single process calls it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def group_of(process_group: Any) -> Any:
    """Returns the group to communicate in; None for a single process."""
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group


def read_optimizers(
    optimizers: Mapping[str, Optimizer], reader: StorageReader, group: Any
) -> dict[str, dict[str, Any]]:
    """Returns the optimizers' state dicts as a checkpoint has them, in memory of their own.

    Leaves out optimizers of other packages whose layout is not known.
    """
    error = None
    try:
        metadata = reader.read_metadata()
    except Exception as problem:  # of any kind: the other ranks must not wait for this rank
        error = f"reading the metadata of the checkpoint: {type(problem).__name__}: {problem}"
    raise_together(error, group)
    saved = {}
    with fail_together(group):
        for key, optimizer in optimizers.items():
            entries = entries_below(metadata, key)
            usual = None if required_of(type(optimizer)) is None else BY_INDEX
            layout = getattr(optimizer, "_checkpoint_layout", usual)  # None if it is not known
            if layout not in (None, saved_as := saved_layout(entries)):
                raise ValueError(
                    f"the state dict saved as '{key}' is {saved_as}, but that of "
                    f"{type(optimizer).__name__} is {layout}: load it into an optimizer of its "
                    f"layout"
                )
            if layout or hasattr(optimizer, "_checkpoint_buffers") or id_lists(entries):
                saved[key] = entries
    every = [entry for entries in saved.values() for entry in entries.items()]
    values: dict[str, Any] = {fqn: None for fqn, (_, like) in every if like is None}
    read(values, reader, group, "the optimizer state")
    loaded: dict[str, dict[str, Any]] = {key: {} for key in saved}
    tensors: dict[str, Any] = {}
    with fail_together(group):
        for key, entries in saved.items():
            ids = {str(i): i for fqn in id_lists(entries) for i in values[fqn]}
            optimizer = optimizers[key]
            if hasattr(optimizer, "_checkpoint_buffers"):
                buffers: Buffers = optimizer._checkpoint_buffers([*ids])
            else:
                pairs = zip(ids, params_of(optimizer), strict=False)
                buffers = buffers_by_key({f"state.{index}": param for index, param in pairs})
            for fqn, (path, like) in entries.items():
                if like is None:
                    value = values[fqn]
                elif (value := buffers(path, like)) is None:
                    continue
                elif value is not like:
                    tensors[fqn] = value
                set_element(loaded[key], path, value)
            for states in (loaded[key], loaded[key].get(BASE, {})):
                if "param_groups" in states:
                    by_text = states.get("state", {})
                    states["state"] = {ids.get(text, text): by_text[text] for text in by_text}
    read(tensors, reader, group, "the optimizer state")
    return loaded


def saved_layout(entries: Entries) -> str:
    if any(path[0] == BASE for path, _ in entries.values()):
        return WITH_BASE
    return BY_INDEX if id_lists(entries) else BY_NAME


def id_lists(entries: Entries) -> list[str]:
    """Returns DCP's keys of the groups' parameter lists, in torch's layout and ours."""
    groups = {
        path: fqn
        for fqn, (path, _) in entries.items()
        if path[-3:-2] == ("param_groups",) and path[-1] == "params"
    }
    return [groups[path] for path in sorted(groups) if path[0] in ("param_groups", BASE)]


def buffers_by_key(params: Mapping[str, Tensor]) -> Buffers:
    """Returns buffers placed as the parameter if they have its shape, otherwise on the host.

    Args:
        params: parameters by the part of their entries' keys before the name, or by the whole key.
            Entries of flat dicts for other parameters are left out.
    """

    def buffer(path: Path, like: Tensor) -> Tensor | None:
        key = ".".join(map(str, path))
        before, _, name = key.rpartition(".")
        param = params.get(key, params.get(before))
        if param is None and len(path) == 1 and key.startswith("state."):
            return None
        if param is not None and name in SCALES and can_quantize(param):
            param = scales_like(param)
        if param is None or name == "step" or like.shape != param.shape:
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.zeros_like(param, dtype=like.dtype)

    return buffer


class _Planner(DefaultLoadPlanner):
    """Unpickles only plain values, whereas torch's planner would run any code.

    Equal bytes are unpickled once: flat states repeat a group's options for every parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unpickled: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        data = value.getvalue()
        if data not in self._unpickled:
            self._unpickled[data] = torch.load(value, weights_only=True)
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, copy.deepcopy(self._unpickled[data]))


def read(values: dict[str, Any], reader: StorageReader, group: Any, what: str) -> None:
    """Calls ``dcp.load`` into ``values``, without running code of the files."""
    alone = group is None
    try:
        load_in_place(
            values, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=alone
        )
    except CheckpointException as error:  # a BaseException, which callers would not expect
        for problem, _ in error.failures.values():
            if not isinstance(problem, Exception):  # such as KeyboardInterrupt
                raise problem from error
        texts = [f"rank {rank}: {problem!r}" for rank, (problem, _) in error.failures.items()]
        raise RuntimeError(f"reading {what}: {'; '.join(texts)}") from error


INDEXED = ("state", f"{BASE}.state", "flat_fp32_weights")
"""The places in state dicts where keys are indices."""


def storable(value: Any, where: str = "") -> Any:
    """Returns a state dict that DCP gives back unchanged, with numpy's numbers as Python's.

    Raises:
        TypeError: a value is neither a dense tensor nor plain, or a key is no string; names it.
    """
    if isinstance(value, Tensor):
        dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        checkpointable = isinstance(value, DTensor) or hasattr(value, "__create_write_items__")
        if not (dense or checkpointable) or value.device.type == "meta":
            raise TypeError(
                f"{where} is a {type(value).__name__} of layout {value.layout} on {value.device}; "
                f"expected a dense tensor"
            )
        return value
    if isinstance(value, Mapping):
        for key in value:
            # DCP turns keys into text, and back only for indices of parameters and groups.
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
    raise TypeError(f"{where} is of type {type(value).__name__}, expected a plain value")


# ---- metadata: a pickle, which could run any code when torch's readers load it -------------------

ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    # Types of the checkpoint's folder; from Python 3.13 on they are in another module.
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local")
      for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    ("collections", "OrderedDict"),
}  # fmt: skip
"""Modules and names that a ``.metadata`` file may refer to; none of them runs code."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f".metadata refers to {module}.{name}, which does not belong to a checkpoint's "
                f"metadata and could run code"
            )
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads checkpoint folders as torch's FileSystemReader does, but runs no code of ``.metadata``.

    ``dcp.load(..., storage_reader=Reader(folder))`` reads ``.metadata`` as :func:`load` does, but
    torch's planner unpickles values that are not tensors, which may run code. The metadata is kept,
    because a load asks for it several times. A folder may be a URL, such as ``s3://bucket/step-5``.
    """

    _read: tuple[Any, Metadata] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.fs = file_system_of(checkpoint_id)
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata.

        Raises:
            ValueError: the file does not exist, holds or refers to something else, or names files
                outside the folder.
        """
        rank = kwargs.get("rank")
        file = self.fs.concat_path(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        try:
            if remote := getattr(self.fs, "fs", None):  # the fsspec file system of a URL
                version = file, remote.ukey(file)
            else:
                status = os.stat(file)
                version = file, (status.st_ino, status.st_size, status.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(
                f"there is no checkpoint in {self.path}: it lacks {PurePath(file).name}"
            ) from error
        if self._read is None or self._read[0] != version:
            with self.fs.create_stream(file, "rb") as stream:
                self._read = version, _checked_metadata(stream, file)
        metadata = self._read[1]
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _checked_metadata(stream: Any, file: Any) -> Metadata:
    try:
        metadata = _Unpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it is of type {type(metadata).__name__}")
        for stored in (metadata.storage_data or {}).values():
            data = PurePath(stored.relative_path)
            if data.is_absolute() or ".." in data.parts:
                raise ValueError(f"{data} is not in the checkpoint's folder")
    except Exception as error:  # a damaged pickle raises any kind
        raise ValueError(f"{file} is not a checkpoint's metadata: {error}") from error
    return metadata


def check_complete(fqn: str, stored: TensorStorageMetadata) -> None:
    """Raises ValueError if a checkpoint lacks elements of a tensor."""
    held, whole = sum(math.prod(chunk.sizes) for chunk in stored.chunks), stored.size.numel()
    if held != whole:
        raise ValueError(
            f"'{fqn}' is incomplete: the checkpoint has {held} of its {whole} elements, so not "
            "all ranks saved theirs"
        )


def entries_below(metadata: Metadata, key: str) -> Entries:
    """Returns the entries of the state dict saved as ``key``, in order, with paths inside it.

    Raises:
        ValueError: the checkpoint has nothing at ``key``, or lacks elements of a tensor.
    """
    entries: Entries = {}
    paths: dict[str, Path] = metadata.planner_data or {}
    for fqn, path in paths.items():
        stored = metadata.state_dict_metadata.get(fqn)
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == key), None)
        if depth is None or stored is None:
            continue
        like = None
        if isinstance(stored, TensorStorageMetadata):
            like = torch.zeros((), dtype=stored.properties.dtype).expand(stored.size)
            check_complete(fqn, stored)
        entries[fqn] = path[depth:], like
    if not entries:
        tops = sorted({str(path[0]) for path in paths.values()})
        raise ValueError(f"the checkpoint has no '{key}'; it has {tops}")
    return entries

"""Reads checkpoints tensor by tensor: files of torch.save and safetensors, and folders of DCP.

No code of a file runs, and only one tensor at a time is in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import pathlib
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchopt_ext._torch import flatten_state_dict
from torchopt_ext.cli.folders import beside, made_by, optimizer_in, weights_in
from torchopt_ext.cli.model_files import files_of, read_header
from torchopt_ext.cli.terminal import CommandError, Progress
from torchopt_ext.state.entries import CONTROL_KEY, MASTERS, MOMENTS
from torchopt_ext.state.quantized import CODES, SCALES
from torchopt_ext.statedict.dcp import Path as KeyPath
from torchopt_ext.statedict.dcp import Reader, check_complete, quiet, read

FILE, FOLDER = "torch.save file", "distributed checkpoint"
SAFETENSORS = "safetensors"
_ZIP = b"PK\x03\x04"
CONTROL, OPTION, WEIGHTS = "control", "option", "weights"
"""Kinds of tensors that are not state of a parameter."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place in a checkpoint.

    Attributes:
        key: the tensor's whole path, as DCP writes it.
        part: the key of the optimizer or model that holds the tensor; "" at the top.
        owner: in an optimizer the parameter, by index or name; otherwise "".
        kind: such as "exp_avg"; CONTROL for the counts of a schedule; OPTION for options of param
            groups; WEIGHTS outside optimizers.
    """

    key: str
    part: str
    owner: str
    kind: str


_KINDS = {"step", *MOMENTS, *MASTERS, *CODES, *SCALES}


def entry_of(key: str, path: KeyPath, optimizers: Set[str]) -> Entry:
    """Returns the entry that a key describes.

    Args:
        key, path: in DCP's form.
        optimizers: parts that have param groups. A model may have a module that is called `state`.
    """
    marked = f".{key}"
    starts = [found.start() for found in re.finditer(r"\.state(?=\.)", marked)]
    state = next((at for at in starts if marked[1:at] in optimizers), -1)
    if state < 0 and marked.rpartition(".")[2] in _KINDS:
        state = marked.find(".state.")
    at = marked.find(f".{CONTROL_KEY}")
    if at >= 0:
        first = state if 0 <= state < at else at
        return Entry(key, marked[1:first], "", CONTROL)
    if (groups := marked.find(".param_groups.")) >= 0:
        return Entry(key, marked[1:groups], "", OPTION)
    if state >= 0:
        owner, _, kind = marked[state + len(".state.") :].rpartition(".")
        return Entry(key, marked[1:state], owner, kind)
    part = str(path[0]) if len(path) > 1 else ""
    return Entry(key, part, "", WEIGHTS)


def is_control(key: str) -> bool:
    """Returns whether a key belongs to the counts of a schedule or of a loss scale."""
    return f".{CONTROL_KEY}" in f".{key}"


class Checkpoint:
    """A checkpoint's tensors by key, without memory, and its other values.

    Attributes:
        path: the file or folder that is read.
        format: FILE, FOLDER or SAFETENSORS.
        made_by: the library that wrote it, where that is known.
        beside: other files of a trainer's checkpoint.
        not_loaded: names of classes whose objects are not loaded, as their code could run.
        tensors: each tensor's shape and dtype; :meth:`tensor` reads a tensor.
        values: everything else.
        paths: the path of each tensor and value in the nested state dict.
        nested: a file's own state dict; None for folders: DCP turns all keys into text.
        bytes: size of the checkpoint's files.
    """

    path: Path
    format: str
    made_by: str | None = None
    beside: Sequence[str] = ()
    not_loaded: Sequence[str] = ()
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    paths: dict[str, KeyPath]
    nested: dict[Any, Any] | None = None
    bytes: int

    def tensor(self, key: str) -> Tensor:
        """Returns the tensor, on the CPU."""
        raise NotImplementedError

    def entry(self, key: str) -> Entry:
        """Returns the entry of a tensor or value."""
        return entry_of(key, self.paths[key], self._optimizers)

    @functools.cached_property
    def _optimizers(self) -> Set[str]:
        marked = (f".{key}".partition(".param_groups.") for key in self.paths)
        return {before[1:] for before, mark, _ in marked if mark}

    def options(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns options by part and param group, or in flat state dicts by part and parameter."""
        groups: dict[str, dict[str, dict[str, Any]]] = {}
        for key, value in {**self.values, **self.tensors}.items():
            before, mark, rest = f".{key}".rpartition(".param_groups.")
            if mark:
                owner, _, name = rest.rpartition(".")
                group = groups.setdefault(before[1:], {}).setdefault(owner, {})
                group[name] = self.tensor(key) if isinstance(value, Tensor) else value
        return groups


_HARMLESS = (argparse.Namespace, pathlib.PosixPath)
"""Classes of hyperparameters, as Lightning saves them, whose code does nothing else."""


class _NotLoaded:
    """Stands for an object of a class whose code could run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


class _File(Checkpoint):
    format = FILE

    def __init__(self, path: Path, only_shown: bool) -> None:
        self.path = path
        with path.open("rb") as stream:
            start = stream.read(4)
        self.bytes = path.stat().st_size
        if start != _ZIP:
            raise CommandError(
                f"{path} is neither a file of torch.save, nor *.safetensors, nor a folder of a "
                f"checkpoint: it begins with {start!r}"
            )
        try:
            safe: list[Any] = [*_HARMLESS]
            with torch.serialization.safe_globals(safe):
                unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if only_shown:
                safe += [(_NotLoaded, name) for name in unknown]
                self.not_loaded = sorted(unknown)
            with torch.serialization.safe_globals(safe):
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged files may raise any kind
            raise CommandError(_why(path, error)) from error
        if not isinstance(loaded, dict):
            raise CommandError(f"{path} holds {type(loaded).__name__}, expected a state dict")
        try:
            flat, self.paths = flatten_state_dict(loaded)
        except ValueError as error:
            raise CommandError(f"{path}: {error}") from error
        self.tensors = {key: value for key, value in flat.items() if isinstance(value, Tensor)}
        self.values = {key: value for key, value in flat.items() if key not in self.tensors}
        self.nested = loaded
        if version := loaded.get("pytorch-lightning_version"):
            self.made_by = f"Lightning {version}"
        for key, value in self.tensors.items():
            plain = type(value) in (Tensor, torch.nn.Parameter)
            if not plain or value.layout is not torch.strided or (value.is_meta and not only_shown):
                what = type(value).__name__ if not plain else value.layout
                what = "on the meta device" if value.is_meta else what
                raise CommandError(f"{path}: {key} is {what}, expected a dense tensor")

    def tensor(self, key: str) -> Tensor:
        return self.tensors[key].detach().resolve_conj().resolve_neg()


class _Folder(Checkpoint):
    format = FOLDER

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, Reader(path)
        try:
            metadata = self._reader.read_metadata()
            stored = metadata.state_dict_metadata
            paths = metadata.planner_data or {}
            self.paths = {key: paths.get(key, (key,)) for key in stored}
            self.tensors = {}
            for key, value in stored.items():
                if isinstance(value, TensorStorageMetadata):
                    check_complete(key, value)
                    like = torch.zeros((), dtype=value.properties.dtype)
                    self.tensors[key] = like.expand(value.size)
            self.bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        except (OSError, ValueError) as error:
            raise CommandError(" ".join(str(error).split())) from error
        self.values = {key: None for key in stored if key not in self.tensors}
        self._read(self.values)

    def _read(self, values: dict[str, Any]) -> None:
        try:
            with quiet():
                read(values, self._reader, None, str(self.path))
        except Exception as error:  # damaged files may raise any kind
            from torchopt_ext.trainer.checkpoint_files import too_short  # a slow import

            short = too_short(self.path, self._reader.read_metadata())
            why = f"{self.path} is truncated: {'; '.join(short)}"
            raise CommandError(why if short else _why(self.path, error)) from error

    def tensor(self, key: str) -> Tensor:
        like = self.tensors[key]
        values = {key: torch.empty(like.shape, dtype=like.dtype)}
        self._read(values)
        return values[key]


def _why(path: Path, error: Exception) -> str:
    """Returns why a checkpoint cannot be read, in one sentence."""
    text = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return f"{path} refers to {found[1]}, whose code could run when it is loaded: not loaded"
    return f"{path} cannot be read: {' '.join(text.split())[:200]}"


class _Safetensors(Checkpoint):
    format = SAFETENSORS

    def __init__(self, path: Path) -> None:
        try:
            self._library = importlib.import_module("safetensors")
        except ImportError as error:
            raise CommandError(f"{path} needs safetensors ({error}): pip install it") from error
        self.path, self.values = path, {}
        self.tensors, self._file_of = {}, {}
        for file in (files := files_of(path)):
            for key, like in read_header(file).items():
                self.tensors[key] = torch.zeros((), dtype=like.dtype).expand(like.shape)
                self._file_of[key] = file
        self.paths = {key: (key,) for key in self.tensors}
        self.bytes = sum(file.stat().st_size for file in files)

    def tensor(self, key: str) -> Tensor:
        with self._library.safe_open(self._file_of[key], framework="pt") as file:
            return file.get_tensor(key)


def open_checkpoint(path: Path, only_shown: bool = False, weights: bool = False) -> Checkpoint:
    """Opens a checkpoint: a file, or what a folder holds.

    Args:
        only_shown: whether the checkpoint is only looked at. Then a file may have tensors on the
            meta device, and objects of classes whose code could run, which are not loaded.
        weights: whether of a folder the model's weights are meant, not the optimizer.
    """
    whole, path = path, (weights_in if weights else optimizer_in)(path) if path.is_dir() else path
    with Progress("reading", 1):
        found: Checkpoint
        if path.is_dir():
            found = _Folder(path)
        elif path.suffix in (".safetensors", ".json"):
            found = _Safetensors(path)
        else:
            found = _File(path, only_shown)
    if by := made_by(path):
        found.made_by = by
    if path != whole or by:
        found.beside = beside(path)
    return found


def give_back_memory() -> None:
    """Makes glibc return the memory of tensors when they are freed.

    glibc keeps blocks of up to 32 MB for later (mallopt(3), M_MMAP_THRESHOLD), but torch's aligned
    blocks do not fit into them again: memory would grow to the size of the checkpoint.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**20)


def memory_of(tensor: Tensor) -> Any:
    """Returns a CPU tensor's elements as a row-major buffer. The tensor must outlive the buffer."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())

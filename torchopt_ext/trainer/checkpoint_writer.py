"""DCP's writer, with a copy in host memory to write from, CRC-32s, and equal values once."""

import copy
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torchopt_ext._torch import dtensor_of, is_dtensor, local_shard
from torchopt_ext.trainer.checkpoint_files import File
from torchopt_ext.trainer.saved_values import PLAIN

_FIXED = (*PLAIN, bytes)
_REPEATED = "torchopt_ext.repeated"
"""The key of a rank's repeated values in its plan, next to the paths of its keys."""


class Staged:
    """A copy of nested dictionaries and lists, with their tensors in host memory.

    If tensors are small, torch's stagers (torch/distributed/checkpoint/staging.py) take ten times
    as long. With ``pinned`` the copy is into pinned memory on a separate stream: call :meth:`wait`
    before the tensors change. Otherwise the constructor returns when everything is copied.
    """

    def __init__(self, state: dict[str, Any], *, pinned: bool) -> None:
        self._copied: torch.cuda.Event | None = None
        self._pinned = pinned
        if not pinned:
            self._state = self._copy(state)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._state = self._copy(state)
            self._copied = stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait until everything is copied; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def result(self) -> Any:
        """Returns the copy when it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._state

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _FIXED:
            return value
        if kind is dict:
            return {k: v if type(v) in _FIXED else self._copy(v) for k, v in value.items()}
        if kind in (list, tuple):
            return kind(map(self._copy, value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if is_dtensor(value):
            return dtensor_of(self._copy(local_shard(value)), value)
        if kind not in (Tensor, torch.nn.Parameter):
            return value.detach().to("cpu", copy=True)
        source = value.detach()
        host = torch.empty_like(source, device="cpu", pin_memory=self._pinned and source.is_cuda)
        if self._pinned and source.is_cuda:  # else a temporary's memory is reused too early
            source.record_stream(torch.cuda.current_stream())
        return host.copy_(source, non_blocking=self._pinned)


class _Summing(io.BufferedWriter):
    """A file that is written from beginning to end, with its CRC-32."""

    crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class _SummingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, File] = {}  # this process's files, by name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _Summing(io.FileIO(path, mode)) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # torch.save reports "unexpected pos" instead of the cause, such as a full disk.
                raise error.__context__ or error from None
        self.written[Path(path).name] = File(size=os.path.getsize(path), crc32=stream.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes the files of a checkpoint that :class:`Planner` plans."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs: _SummingFiles = _SummingFiles()
        self.repeated: dict[str, str] = {}  # all ranks' repeated values, on the coordinator

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        at = {result.index.fqn: result for of_rank in results for result in of_rank}
        missing = {key: at[first] for key, first in self.repeated.items() if key not in at}
        repeated = [replace(same, index=MetadataIndex(key)) for key, same in missing.items()]
        super().finish(metadata, [*results, repeated])


class Planner(DefaultSavePlanner):
    """Plans a checkpoint that stores equal plain values once, under all their keys.

    A flat optimizer state repeats every option of a group for each parameter. If parameters are
    small, saving each option takes half of the time. Any reader finds the values, because the
    metadata gives file and position for each key.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def create_local_plan(self) -> SavePlan:
        first: dict[tuple[type, str], str] = {}
        repeated: dict[str, str] = {}
        for key, value in self.state_dict.items():
            items = value if type(value) in (list, tuple) else [value]
            if all(type(item) in PLAIN for item in items):  # type and repr determine the value
                same = first.setdefault((type(value), repr(value)), key)
                if same != key:
                    repeated[key] = same
        self.state_dict = {key: v for key, v in self.state_dict.items() if key not in repeated}
        plan = super().create_local_plan()
        return replace(plan, planner_data={**self.mappings, _REPEATED: repeated})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for plan in all_plans:
            self._writer.repeated.update(plan.planner_data.pop(_REPEATED))
        plans, metadata = super().create_global_plan(all_plans)
        for key in self._writer.repeated:
            metadata.state_dict_metadata.setdefault(key, BytesStorageMetadata())
        return plans, metadata

"""torch's writer of distributed checkpoints, with CRC-32s and without repeated values."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torchopt_ext.trainer.checkpoint_files import File
from torchopt_ext.trainer.saved_values import PLAIN

_REPEATED = "torchopt_ext.repeated"
"""The key of a rank's repeated values in its plan, next to the paths of its keys."""


class _Summing:
    """A file that is written from beginning to end, with its CRC-32."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc32 = stream, 0
        self.failed: OSError | None = None
        self.tell, self.flush = stream.tell, stream.flush
        self.fileno, self.close = stream.fileno, stream.close

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failed = error
            raise


class _SummingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, File] = {}  # this process's files, by name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode) as stream:
            summing = _Summing(stream)
            try:
                yield summing
            except RuntimeError as error:
                # torch.save then reports "unexpected pos" instead of the cause.
                raise summing.failed or error from None
        self.written[Path(path).name] = File(size=os.path.getsize(path), crc32=summing.crc32)

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
        at = {result.index.fqn: result for own in results for result in own}
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

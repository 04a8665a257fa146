"""The metadata of a distributed checkpoint (torch.distributed.checkpoint, DCP), read safely.

``.metadata`` is a pickle, which could run any code when torch's readers load it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

Path = tuple[str | int, ...]
"""Keys and list positions that lead to an entry of a nested state dict."""

_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    # The checkpoint's folder; the module is another from Python 3.13 on.
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local")
      for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    ("collections", "OrderedDict"),
}  # fmt: skip
"""Modules and names of what a ``.metadata`` file may refer to; none of it runs code."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"the checkpoint's .metadata refers to {module}.{name}, which is no part of a "
                f"checkpoint's metadata and could run code"
            )
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """torch's reader of checkpoints in folders, which runs no code of the files.

    ``dcp.load(..., storage_reader=Reader(folder))`` reads ``.metadata`` as :func:`load` does.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            pickle.UnpicklingError: the file refers to something else than metadata.
        """
        name = ".metadata" if kwargs.get("rank") is None else f"__{kwargs['rank']}.metadata"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
            found: Metadata = _Unpickler(file).load()
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return found


class Saved(NamedTuple):
    """An entry of a checkpoint: where it belongs in the state dict, and what DCP knows of it."""

    path: Path
    stored: Any

    @property
    def like(self) -> torch.Tensor | None:
        """A tensor of its shape and dtype, without memory; None for a value."""
        if not isinstance(self.stored, TensorStorageMetadata):
            return None
        return torch.zeros((), dtype=self.stored.properties.dtype).expand(self.stored.size)


def entries_below(metadata: Metadata, key: str) -> dict[str, Saved]:
    """The entries of the state dict saved as ``key`` by their DCP keys, in its order.

    Raises:
        ValueError: there is nothing at ``key``, or some elements are missing.
    """
    entries: dict[str, Saved] = {}
    paths: Mapping[str, Path] = metadata.planner_data or {}
    for fqn, path in paths.items():
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == key), None)
        if depth is not None and fqn in metadata.state_dict_metadata:
            entries[fqn] = Saved(tuple(path[depth:]), metadata.state_dict_metadata[fqn])
    if not entries:
        tops = sorted({str(path[0]) for path in paths.values()})
        raise ValueError(f"the checkpoint has no '{key}'; it has {tops}")
    for fqn, (_, stored) in entries.items():
        if isinstance(stored, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != stored.size.numel():
                raise ValueError(
                    f"'{fqn}' is incomplete: the checkpoint has {held} of its "
                    f"{stored.size.numel()} elements, so not all ranks saved theirs"
                )
    return entries

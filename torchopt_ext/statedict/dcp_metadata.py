"""The metadata of a distributed checkpoint (torch.distributed.checkpoint, DCP), read safely.

``.metadata`` is a pickle, which could run any code when torch's readers load it.
"""

from __future__ import annotations

import math
import pickle
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list positions that lead to an entry of a nested state dict."""
Entries: TypeAlias = dict[str, tuple[Path, Tensor | None]]
"""By DCP's key the path, and a tensor of the entry's shape and dtype without memory.

The tensor is None for other values.
"""

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
                f".metadata refers to {module}.{name}, which is no part of a checkpoint's metadata "
                f"and could run code"
            )
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """torch's reader of checkpoints in folders, which runs no code of the files.

    ``dcp.load(..., storage_reader=Reader(folder))`` reads ``.metadata`` as :func:`load` does.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            ValueError: the file holds or refers to something else, or names files elsewhere.
        """
        rank = kwargs.get("rank")
        file = self.fs.concat_path(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        with self.fs.create_stream(file, "rb") as stream:
            try:
                found = _Unpickler(stream).load()
                if not isinstance(found, Metadata):
                    raise TypeError(f"it is a {type(found).__name__}")
                for stored in (found.storage_data or {}).values():
                    data = PurePath(stored.relative_path)
                    if data.is_absolute() or ".." in data.parts:
                        raise ValueError(f"{data} is not in the checkpoint's folder")
            except Exception as error:  # a damaged pickle raises any kind
                raise ValueError(f"{file} is no checkpoint's metadata: {error}") from error
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def entries_below(metadata: Metadata, key: str) -> Entries:
    """The entries of the state dict saved as ``key``, in its order, with paths in it.

    Raises:
        ValueError: there is nothing at ``key``, or some elements are missing.
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
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != like.numel():
                raise ValueError(
                    f"'{fqn}' is incomplete: the checkpoint has {held} of its {like.numel()} "
                    f"elements, so not all ranks saved theirs"
                )
        entries[fqn] = path[depth:], like
    if not entries:
        tops = sorted({str(path[0]) for path in paths.values()})
        raise ValueError(f"the checkpoint has no '{key}'; it has {tops}")
    return entries

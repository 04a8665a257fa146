"""Samples cut from one long text: windows of tokens, and files as one sequence of bytes."""

import ctypes
import os
import stat
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["FileBytes", "TokenWindows"]

_BLOCK, _BLOCKS = 1 << 20, 256
Batch = tuple[dict[str, Tensor], Tensor]


class TokenWindows(Dataset[Tensor]):
    """Consecutive windows of `seq_len + 1` tokens of any integer type. A remainder is left out."""

    def __init__(self, tokens: "Tensor | FileBytes", seq_len: int) -> None:
        self._tokens, self.seq_len = tokens, seq_len

    @cached_property
    def crc32(self) -> int:
        """The CRC-32 of the tokens; of evenly spaced blocks if there are many."""
        crc = 0
        for start in range(0, len(self._tokens), max(_BLOCK, len(self._tokens) // _BLOCKS)):
            block = self._tokens[start : start + _BLOCK].contiguous()
            crc = zlib.crc32(ctypes.string_at(block.data_ptr(), block.nbytes), crc)
        return crc

    def __len__(self) -> int:
        return len(self._tokens) // (self.seq_len + 1)

    def __getitem__(self, index: int) -> Tensor:
        """Returns window `index`: [seq_len + 1], of the tokens' type."""
        start = index * (self.seq_len + 1)
        return self._tokens[start : start + self.seq_len + 1]

    @staticmethod
    def collate_fn(windows: list[Tensor]) -> Batch:
        """Returns inputs, and the next token of each as labels: int64 [batch, seq_len]."""
        batch = torch.stack(windows).long()
        return {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()


class FileBytes:
    """The bytes of all files under a path as one sequence, in the order of their names.

    Files are mapped into memory when they are read, and never copied as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.paths = list(files_under(path))
        self._ends = list(accumulate(file.stat().st_size for file in self.paths))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, span: slice, /) -> Tensor:
        """Returns bytes start to stop: uint8 [stop - start]."""
        start, stop, _ = span.indices(len(self))
        pieces = []
        index = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[index - 1] if index else 0
            end = min(stop, self._ends[index])
            content = _map_file(self.paths[index], self._ends[index] - begin)
            pieces.append(content[start - begin : end - begin])
            start, index = end, bisect_right(self._ends, end)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


@lru_cache(maxsize=4096)  # a process may have 65,530 maps
def _map_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def files_under(path: Path) -> Iterator[Path]:
    """Yields all regular files under `path`, by relative path, or `path` if it is a file.

    Pipes and devices, which would block or never end, are left out. A file or folder that cannot be
    read raises the system's error.
    """

    def fail(error: OSError) -> None:
        raise error

    if path.is_dir():
        folders = os.walk(path, onerror=fail, followlinks=True)
        paths = [Path(folder, name) for folder, _, names in folders for name in names]
        paths.sort(key=lambda file: file.relative_to(path).as_posix())
    else:
        paths = [path]
    for file in paths:
        if not stat.S_ISREG(file.stat().st_mode):
            continue
        with file.open("rb"):
            yield file

"""One rank's part of a state tensor, for torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torchopt_ext._torch import make_wrapper_subclass
from torchopt_ext.optim.balanced_plan import memory_order
from torchopt_ext.zero.part import Part, in_memory_order

_SHARD_BY_SHARD = {
    *("clone.default", "detach.default", "_to_copy.default"),
    *("empty_like.default", "zeros_like.default", "new_empty.default"),
}

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class StateShard(Tensor):
    """This rank's boxes of one state tensor, in the form of DCP's ``_Checkpointable`` protocol.

    It has the whole tensor's shape but memory only for the boxes. DCP stages, copies, writes and
    fills it. Computations with it raise, and so does torch.save.
    """

    shards: list[Tensor]  # the boxes' elements, of one dtype and device
    chunks: list[ChunkStorageMetadata]  # the boxes' places in the whole tensor
    elsewhere: bool  # another rank writes the whole tensor
    entries: dict[tuple[int, int], Tensor]  # by (begin, end) of the part; empty in copies

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        shards: list[Tensor],
        chunks: list[ChunkStorageMetadata],
        elsewhere: bool = False,
    ) -> StateShard:
        shard: StateShard = make_wrapper_subclass(
            cls, torch.Size(shape), dtype=shards[0].dtype, device=shards[0].device
        )
        shard.shards, shard.chunks, shard.elsewhere, shard.entries = shards, chunks, elsewhere, {}
        return shard

    @classmethod
    def of(cls, pieces: Sequence[tuple[Part, Tensor]], elsewhere: bool = False) -> StateShard:
        """Makes a shard of a parameter's parts from the values of one of their state entries."""
        shards, chunks, shape = [], [], pieces[0][0].like.shape
        for part, value in pieces:
            if part.is_whole:  # the entry is whole as well, whatever its shape
                shape = value.shape
                shards, chunks = [value], [_chunk([0] * value.dim(), shape)]
                continue
            flat, first = in_memory_order(value, part.tensor), 0
            order = memory_order(part.like)
            position = [order.index(d) for d in range(len(order))]  # of each dimension in memory
            for offsets, sizes in boxes(part.begin, part.end, [part.like.shape[d] for d in order]):
                count = math.prod(sizes)
                shards.append(flat[first : first + count].view(sizes).permute(position))
                chunks.append(_chunk([offsets[i] for i in position], shards[-1].shape))
                first += count
        shard = cls(shape, shards, chunks, elsewhere)
        shard.entries = {(part.begin, part.end): value for part, value in pieces}
        return shard

    def of_part(self, part: Part) -> Tensor:
        """Returns the value that :meth:`of` got for a part; raises ValueError for another part."""
        if (part.begin, part.end) not in self.entries:
            raise ValueError(
                f"it has {self!r}, but this rank owns elements {part.begin} to {part.end} of "
                f"memory: load the whole state dict, or a checkpoint"
            )
        return self.entries[part.begin, part.end]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> StateShard:
        """Runs what DCP's stagers use (_state_dict_stager.py, _state_dict_utils.py) on each box."""
        first, rest, kwargs = args[0], args[1:], kwargs or {}
        name = func.__name__
        if name == "copy_.default":
            for shard, other in zip(first.shards, rest[0].shards, strict=True):
                shard.copy_(other)
            return first
        if name not in _SHARD_BY_SHARD:
            raise NotImplementedError(f"{func} of a StateShard, which is for checkpoints only")
        new = name == "new_empty.default"  # its argument is the whole tensor's shape
        shards = [func(s, *((s.shape,) if new else rest), **kwargs) for s in first.shards]
        return cls(first.shape, shards, first.chunks, first.elsewhere)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.chunks]
        return f"StateShard({tuple(self.shape)}, {self.dtype}, offsets and sizes {boxes})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "Optimizer state has not been consolidated on this rank since the last step: its state "
            "dict has this rank's part only. Please call `consolidate_state_dict(to=...)` on all "
            "ranks beforehand if you meant to save the global state, or save with dcp.save"
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in ([] if self.elsewhere else self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for shard, chunk in zip(self.shards, self.chunks, strict=True):
            if chunk.offsets == index.offset:
                return shard
        raise ValueError(f"'{index.fqn}' has nothing at {index.offset} on this rank, but {self!r}")


# DCP's separate writer process (AsyncCheckpointerType.PROCESS) gets the state dict by pickle.
ForkingPickler.register(
    StateShard, lambda s: (StateShard, (s.shape, s.shards, s.chunks, s.elsewhere))
)


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def boxes(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Divides row-major elements [begin, end) of a tensor into the fewest contiguous boxes."""
    if end <= begin:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])

    def within(index: int, begin: int, end: int) -> Iterator[Box]:
        for offsets, sizes in boxes(begin - index * row, end - index * row, shape[1:]):
            yield (index, *offsets), (1, *sizes)

    head, tail = -(-begin // row), end // row  # whole rows are [head, tail)
    if head > tail:
        yield from within(tail, begin, end)
        return
    yield from within(head - 1, begin, head * row)
    if head < tail:
        yield (head, *[0] * (len(shape) - 1)), (tail - head, *shape[1:])
    yield from within(tail, tail * row, end)

"""Distributed checkpoints (torch.distributed.checkpoint, DCP) of a sharded optimizer.

Every rank writes and reads its own parts only. A checkpoint has the keys and shapes of the
unsharded optimizer's, so any world size, either partition and the unsharded optimizer can load it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader

from torchopt_ext._torch import make_wrapper_subclass
from torchopt_ext.optim.agreement import agree, all_gather_text
from torchopt_ext.optim.dcp import Saved, nested, read, saved_entries, without_memory
from torchopt_ext.zero import metadata
from torchopt_ext.zero import state as zero_state
from torchopt_ext.zero.local_optimizer import index_of as numbered
from torchopt_ext.zero.part import Part, in_param_order
from torchopt_ext.zero.ranks import bounded
from torchopt_ext.zero.sharded import ShardedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


# ---- saving --------------------------------------------------------------------------------------


@bounded
def sharded_state_dict(zero: ShardedOptimizer) -> dict[str, Any]:
    """This rank's part of the unsharded optimizer's state dict, for DCP. Call it on all ranks.

    ``dcp.save({"optimizer": sharded_state_dict(zero)}, checkpoint_id=...)``. Tensors are the
    optimizer's own; ``dcp.async_save`` copies them before it returns, and needs a process group of
    its own, as steps use the other one meanwhile. :func:`load_sharded` and unsharded optimizers
    load it.

    Raises:
        RuntimeError: on all ranks, if one has an entry that DCP would not give back as it is.
    """
    zero._check_overlap_initialized()
    local = zero_state.local_state_dict(zero)
    parts, index_of = zero_state.local_parts(zero), numbered(zero._all_params)
    pieces: dict[int, dict[str, list[Piece]]] = {}
    for number, entry in local["state"].items():
        if isinstance(number, int) and 0 <= number < len(parts):
            own = pieces.setdefault(index_of[parts[number].param], {})
            for name, value in (entry or {}).items():
                own.setdefault(name, []).append((parts[number], value))
    state = {
        index: {name: joined(of_name) for name, of_name in own.items()}
        for index, own in sorted(pieces.items())
    }
    extra = {key: value for key, value in local.items() if key not in ("state", "param_groups")}
    firsts = all_gather_text(str(min(state, default="")), zero.process_group)
    first = min((int(index) for index in firsts if index), default=None)
    result = zero_state.packed(zero, {"state": state, "extra": extra}, first)
    error = None
    try:
        check_storable(result, "")
    except TypeError as problem:
        error = f"saving the optimizer state: {problem}"
    agree(error, zero.process_group)
    return result


def check_storable(value: Any, where: str) -> None:
    """Raises TypeError unless DCP gives ``value`` back as it is, without running pickled code."""
    if isinstance(value, StateShard):
        return
    if isinstance(value, Tensor):
        kind = type(value)
        if kind not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            raise TypeError(
                f"{where} is a {kind.__name__} of layout {value.layout} on {value.device}; "
                f"expected a plain dense tensor"
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            # DCP turns keys into text, which is undone for the parameters' indices only.
            if not isinstance(key, str) and where != "state":
                raise TypeError(f"{where} has the key {key!r}, expected strings as keys")
            check_storable(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_storable(item, f"{where}.{position}")
    else:
        metadata.encode(value, where)


# ---- shards --------------------------------------------------------------------------------------


class StateShard(Tensor):
    """This rank's boxes of one state tensor, as DCP's ``_Checkpointable`` protocol wants them.

    It has the whole tensor's shape but only memory for the boxes. DCP stages and copies it; it is
    not for computing.

    Args:
        shape: of the whole tensor.
        shards: the boxes' elements, of one dtype and device.
        chunks: where in the whole tensor they are.
    """

    shards: list[Tensor]
    chunks: list[ChunkStorageMetadata]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], shards: list[Tensor], chunks: list[ChunkStorageMetadata]
    ) -> StateShard:
        made: StateShard = make_wrapper_subclass(
            cls, torch.Size(shape), dtype=shards[0].dtype, device=shards[0].device
        )
        made.shards, made.chunks = shards, chunks
        return made

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> StateShard:
        """The state entries of parts of one parameter; views of them where they are contiguous."""
        shards, chunks = [], []
        for part, value in pieces:
            flat, first = part.in_memory_order(value), 0
            for offsets, sizes in boxes(part.begin, part.end, part.memory_shape):
                count = math.prod(sizes)
                box = flat[first : first + count].view(sizes)
                shards.append(in_param_order(part.param, box))
                place = [offsets[part.order.index(d)] for d in range(len(offsets))]
                chunks.append(ChunkStorageMetadata(torch.Size(place), shards[-1].shape))
                first += count
        return cls(pieces[0][0].param.shape, shards, chunks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> StateShard:
        """What DCP's stagers use (_state_dict_stager.py, _state_dict_utils.py), box by box."""
        first, rest, kwargs = args[0], args[1:], kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            for shard, other in zip(first.shards, rest[0].shards, strict=True):
                shard.copy_(other)
            return first
        if func is aten.new_empty.default:
            shards = [func(shard, shard.shape, **kwargs) for shard in first.shards]
        elif func in (
            aten.clone.default,
            aten.detach.default,
            aten._to_copy.default,
            aten.empty_like.default,
            aten.zeros_like.default,
        ):
            shards = [func(shard, *rest, **kwargs) for shard in first.shards]
        else:
            raise NotImplementedError(f"{func} of a StateShard, which is for checkpoints only")
        return cls(first.shape, shards, first.chunks)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.chunks]
        return f"StateShard({tuple(self.shape)}, {self.dtype}, offsets and sizes {boxes})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for shard, chunk in zip(self.shards, self.chunks, strict=True):
            if chunk.offsets == index.offset:
                return shard
        raise ValueError(f"'{index.fqn}' has nothing at {index.offset} on this rank, but {self!r}")


Piece = tuple[Part, Any]
"""A part and the value of one of its state entries."""


def joined(pieces: Sequence[Piece]) -> Any:
    """One value for DCP of an entry of all of this rank's parts of a parameter."""
    part, value = pieces[0]
    if part.is_whole or not part.divides(value):
        return value
    return StateShard.of(pieces)


def boxes(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Row-major elements [begin, end) of a tensor as the fewest boxes that are each contiguous."""
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


# ---- loading -------------------------------------------------------------------------------------


@bounded
@torch.no_grad()
def load_sharded(
    zero: ShardedOptimizer,
    checkpoint: str | os.PathLike[str] | StorageReader,
    key: str = "optimizer",
    process_group: Any = None,
) -> None:
    """Loads this rank's parts of a DCP checkpoint; call it on all ranks.

    The checkpoint may be from :func:`sharded_state_dict` with any world size and partition, or an
    unsharded optimizer's state dict. Everything is read and checked before anything is changed.
    Hooks on ``load_state_dict`` do not run: no rank has a state dict to give them.

    Args:
        zero: the optimizer.
        checkpoint: a folder, or a reader of another storage.
        key: where the optimizer's state dict is in what was saved.
        process_group: the ranks that call this; those of the optimizer by default.

    Raises:
        ValueError: on all ranks, if groups, shapes or keys do not fit; names the parameter or key.
        RuntimeError: on all ranks, if one cannot read its parts.
    """
    zero._check_overlap_initialized()
    group = zero.process_group if process_group is None else process_group
    reader = checkpoint
    if not isinstance(reader, StorageReader):
        reader = FileSystemReader(reader)
    entries = saved_entries(reader, key, "param_groups", group)

    common = {fqn: entry for fqn, entry in entries.items() if entry.path[0] != "state"}
    top = nested(read({fqn: room(entry) for fqn, entry in common.items()}, reader, group), common)
    groups = top.pop("param_groups")
    for of_group in groups:  # DCP made text of the state's keys
        of_group["params"] = [str(index) for index in of_group["params"]]
    sketch = nested({fqn: without_memory(entry) for fqn, entry in entries.items()}, entries)
    state = sketch.get("state", {})
    zero_state.check(zero, {**top, "state": state, "param_groups": groups})

    ids = [index for of_group in groups for index in of_group["params"]]
    id_of = dict(zip(zero._all_params, ids, strict=True))
    by_id: dict[str, dict[str, Saved]] = {}
    for fqn, entry in entries.items():
        if entry.path[0] == "state":
            by_id.setdefault(str(entry.path[1]), {})[fqn] = entry._replace(path=entry.path[2:])
    pieces: dict[str, list[Piece]] = {}
    for part in (parts := zero_state.local_parts(zero)):
        for fqn, entry in by_id.get(id_of[part.param], {}).items():
            pieces.setdefault(fqn, []).append((part, room(entry, part)))
    whole = read({fqn: joined(of_fqn) for fqn, of_fqn in pieces.items()}, reader, group)
    divided = {
        (fqn, part): value
        for fqn, of_fqn in pieces.items()
        if isinstance(whole[fqn], StateShard)
        for part, value in of_fqn
    }
    local = {}
    for number, part in enumerate(parts):
        if own := by_id.get(id_of[part.param]):
            local[number] = nested({f: divided.get((f, part), whole[f]) for f in own}, own)
    zero_state.load_local(zero, groups, local, top)


def room(entry: Saved, part: Part | None = None) -> Tensor | None:
    """A tensor to read an entry into, that of a part if it is a parameter's; None for a value."""
    stored = entry.stored
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    if part is not None and stored.size == part.param.shape:
        like = part.tensor if part.divided else part.param
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)

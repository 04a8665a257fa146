"""What the ranks of one process group tell each other outside of a step.

Comparison of what all must have, and optimizer state on its way to one rank. Ranks are ranks of the
group. Tensors travel as bytes: gloo does not know every dtype.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchopt_ext.optim.collective import (
    agree,
    all_gather,
    all_gather_text,
    bytes_text,
    collective,
    comm_device,
    text_bytes,
    wait,
)
from torchopt_ext.zero import metadata

STAGING_BYTES = 16 << 20  # the most that one message carries
_ALONE_BYTES = 4 << 20  # tensors of this size share no message, so need no staging of their own
_ALIGNMENT = 16  # of tensors in a message: the largest element, complex128
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_CONSOLIDATING = "consolidating the optimizer state"


def check_same(descriptions: Sequence[str], what: str, group: dist.ProcessGroup) -> None:
    """Raise on every rank unless all have the same descriptions. All ranks call it.

    Only a count and a digest travel while they are the same.

    Args:
        descriptions: one a parameter: "'wq.weight': float32 (16, 8), trainable".
        what: what they are of, for errors: "parameters".

    Raises:
        ValueError: the first position where ranks differ, and what each has there.
        RuntimeError: a rank died or is late.
    """
    purpose = f"comparing the {what} of the ranks"
    text = json.dumps(list(descriptions))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    mine = torch.tensor([len(descriptions), int.from_bytes(digest, "little", signed=True)])
    first, *others = all_gather(mine, group, purpose)
    if all(torch.equal(first, other) for other in others):
        return
    lists: list[list[str]] = [json.loads(t) for t in all_gather_text(text, group, purpose)]
    for position, found in enumerate(zip_longest(*lists)):
        if len(set(found)) > 1:
            # ranks by what they have, as there may be hundreds of ranks
            ranks: dict[str | None, list[str]] = {}
            for rank, description in enumerate(found):
                ranks.setdefault(description, []).append(str(rank))
            has = [f"{d or 'nothing'} on rank {', '.join(of)}" for d, of in ranks.items()]
            raise ValueError(
                f"the ranks differ in their {what}, expected the same in the same order; first at "
                f"position {position}: {'; '.join(has)}"
            )


@dataclass
class Entry:
    """One value of the optimizer state, or this rank's part of a tensor that several ranks hold.

    Attributes:
        index: the parameter's index in the state dict.
        name: the key in the parameter's state.
        value: anything `metadata.encode` takes; with `shape`, a tensor.
        shape: of the full tensor, of which `value` holds the row-major elements [begin,
            begin + value.numel()).
        begin: where they begin.
    """

    index: int
    name: Any
    value: Any
    shape: tuple[int, ...] | None = None
    begin: int = 0


def gather_entries(
    entries: Sequence[Entry], to: int, group: dist.ProcessGroup
) -> dict[int, dict[Any, Any]] | None:
    """Bring the entries of all ranks together on rank `to`. All ranks call it.

    Beyond the result, a rank needs the memory of one message (STAGING_BYTES).

    Returns:
        On rank `to`, ``{index: {name: value}}`` by ascending index, names in the order of the
        lowest rank that has the index, tensors on the CPU in memory of their own, dense ones with
        the strides they had. Of a value without `shape` that several ranks have, that of the lowest
        rank. None on other ranks.

    Raises:
        RuntimeError: on every rank, if an entry cannot be sent; or a rank died or is late.
        ValueError: on rank `to`, parts of a tensor do not make up all of it.
    """
    header, tensors, error = "", list[Tensor](), None
    try:
        header, tensors = _describe(entries)
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = f"{_CONSOLIDATING}: {problem}"
    agree(error, group)

    device = comm_device(group)
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
    if dist.get_rank(group) != to:
        _send_text(header, to, group)
        _send_tensors(tensors, staging, to, group)
        return None

    result = _Result()
    for rank in range(dist.get_world_size(group)):
        if rank == to:
            for tensor, place in zip(tensors, result.places(header, rank), strict=True):
                if place is not None:
                    _copy_elements(tensor, 0, tensor.numel(), place)
        else:
            places = result.places(_receive_text(rank, group), rank)
            _receive_tensors(result.sizes, places, staging, rank, group)
    return result.finish()


# ---- what is sent --------------------------------------------------------------------------------


def _describe(entries: Sequence[Entry]) -> tuple[str, list[Tensor]]:
    """The header, from which the target knows what follows, and what follows."""
    described, sent = [], list[Tensor]()
    for entry in entries:
        where = f"state of parameter {entry.index} [{entry.name!r}]"
        text, tensors = metadata.encode({entry.name: entry.value}, where)
        if entry.shape is not None and not isinstance(entry.value, Tensor):
            kind = type(entry.value).__name__
            raise TypeError(f"{where}: is a {kind}, expected a tensor, as a part of one")
        layouts = []
        for tensor in tensors:
            # A subclass's bytes, and a sparse tensor's, are elsewhere.
            if (
                type(tensor) not in (Tensor, nn.Parameter)
                or tensor.layout is not torch.strided
                or tensor.is_meta
                or tensor.is_quantized
            ):
                raise TypeError(
                    f"{where}: cannot send a {type(tensor).__name__} of layout {tensor.layout} on "
                    f"{tensor.device}; tensors must be plain and dense"
                )
            if entry.shape is None:
                # as torch.clone lays it out: dense tensors keep their strides
                strides = torch.empty_like(tensor, device="meta").stride()
            else:
                strides = torch.empty(tensor.shape, device="meta").stride()
            layouts.append((tensor.dtype, tensor.shape, strides))
            sent.append(_in_memory_order(_bits(tensor), strides))
        described.append((entry.index, entry.name, entry.shape, entry.begin, text, layouts))
    return metadata.encode(described, "header")[0], sent


def _bits(tensor: Tensor) -> Tensor:
    """The elements as numbers of the same size that every operator can copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.element_size()])


def _in_memory_order(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A view whose row-major order is the order in memory of a dense tensor of these strides."""
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


def _copy_elements(tensor: Tensor, begin: int, end: int, out: Tensor) -> None:
    """Row-major elements [begin, end), without a contiguous copy of the whole tensor."""
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[begin:end])
        return
    row = tensor[0].numel()
    at = begin
    while at < end:
        first, within = divmod(at, row)
        last = end // row
        if within == 0 and last > first:
            stop = last * row
            out[at - begin : stop - begin].view(-1, *tensor.shape[1:]).copy_(tensor[first:last])
        else:
            stop = min(end, (first + 1) * row)
            part = out[at - begin : stop - begin]
            _copy_elements(tensor[first], within, within + stop - at, part)
        at = stop


# ---- how it travels ------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Elements [begin, end) of one tensor, `at` bytes into a message."""

    number: int
    begin: int
    end: int
    at: int


class _Size(NamedTuple):
    """What of a tensor decides how it is cut into messages."""

    numel: int
    element_size: int


def _messages(sizes: Sequence[_Size]) -> Iterator[tuple[list[_Piece], int]]:
    """What travels together, with its bytes; the sender and the receiver find the same."""
    shared: list[_Piece] = []
    used = 0
    for number, (numel, element_size) in enumerate(sizes):
        nbytes = numel * element_size
        if nbytes >= _ALONE_BYTES:
            step = STAGING_BYTES // element_size
            for begin in range(0, numel, step):
                end = min(begin + step, numel)
                yield [_Piece(number, begin, end, 0)], (end - begin) * element_size
        elif nbytes:
            at = -(-used // _ALIGNMENT) * _ALIGNMENT
            if at + nbytes > STAGING_BYTES:
                yield shared, used
                shared, at = [], 0
            shared.append(_Piece(number, 0, numel, at))
            used = at + nbytes
    if shared:
        yield shared, used


def _send_tensors(
    tensors: Sequence[Tensor], staging: Tensor, to: int, group: dist.ProcessGroup
) -> None:
    sizes = [_Size(t.numel(), t.element_size()) for t in tensors]
    for pieces, nbytes in _messages(sizes):
        number, begin, end, _ = pieces[0]
        tensor = tensors[number]
        if len(pieces) == 1 and tensor.device == staging.device and tensor.is_contiguous():
            message = tensor.view(-1)[begin:end].view(torch.uint8)
        else:
            for piece in pieces:
                tensor = tensors[piece.number]
                _copy_elements(tensor, piece.begin, piece.end, _staged(piece, staging, tensor))
            message = staging[:nbytes]
        _send(message, to, group)


def _receive_tensors(
    sizes: Sequence[_Size],
    places: Sequence[Tensor | None],
    staging: Tensor,
    source: int,
    group: dist.ProcessGroup,
) -> None:
    for pieces, nbytes in _messages(sizes):
        number, begin, end, _ = pieces[0]
        place = places[number]
        if len(pieces) == 1 and place is not None and place.device == staging.device:
            _receive(place[begin:end].view(torch.uint8), source, group)
        else:
            _receive(staging[:nbytes], source, group)
            for piece in pieces:
                place = places[piece.number]
                if place is not None:
                    place[piece.begin : piece.end].copy_(_staged(piece, staging, place))


def _staged(piece: _Piece, staging: Tensor, like: Tensor) -> Tensor:
    nbytes = (piece.end - piece.begin) * like.element_size()
    return staging[piece.at : piece.at + nbytes].view(like.dtype)


# ---- what is received ----------------------------------------------------------------------------


@dataclass
class _Full:
    """A tensor of which ranks send parts."""

    tensor: Tensor
    parts: list[tuple[int, int, int]]  # begin, end, rank


class _Result:
    """The state as it grows, rank by rank, and what was found to be wrong with it."""

    def __init__(self) -> None:
        self.state: dict[int, dict[Any, Any]] = {}
        self.full: dict[tuple[int, Any], _Full] = {}
        self.problem: str | None = None  # the first
        self.sizes: list[_Size] = []  # of what the rank sends whose header was read last

    def places(self, header: str, rank: int) -> list[Tensor | None]:
        """Where the tensors of a rank go, as bits in the order in which they travel.

        None stands for a tensor that is not needed.
        """
        found: list[Tensor | None] = []
        self.sizes = []
        for index, name, shape, begin, text, layouts in metadata.decode(header, ()):
            self.sizes += [_Size(torch.Size(s).numel(), dtype.itemsize) for dtype, s, _ in layouts]
            state = self.state.setdefault(index, {})
            if shape is not None:
                ((dtype, part_shape, _),) = layouts
                end = begin + torch.Size(part_shape).numel()
                found.append(self._part(state, index, name, dtype, shape, begin, end, rank))
            elif name in state:
                if (index, name) in self.full:
                    self._report(index, name, f"rank {rank} has all of it, lower ranks have parts")
                found += [None] * len(layouts)
            else:
                tensors = [torch.empty_strided(s, strides, dtype=d) for d, s, strides in layouts]
                state[name] = metadata.decode(text, tensors)[name]
                found += [_in_memory_order(_bits(t), t.stride()).reshape(-1) for t in tensors]
        return found

    def _part(
        self, state: dict[Any, Any], index: int, name: Any, dtype: torch.dtype,
        shape: tuple[int, ...], begin: int, end: int, rank: int,
    ) -> Tensor | None:  # fmt: skip
        full = self.full.get((index, name))
        if full is None:
            if name in state:
                self._report(index, name, f"rank {rank} has a part of it, a lower rank has all")
                return None
            state[name] = torch.empty(shape, dtype=dtype)
            full = self.full[index, name] = _Full(state[name], [])
        expected = (full.tensor.dtype, tuple(full.tensor.shape))
        if (dtype, tuple(shape)) != expected:
            self._report(
                index,
                name,
                f"is a part of a {dtype} tensor of shape {tuple(shape)} on rank {rank}, expected "
                f"{expected[0]} and {expected[1]} as on lower ranks",
            )
            return None
        if not 0 <= begin <= end <= full.tensor.numel():
            self._report(
                index,
                name,
                f"rank {rank} has elements [{begin}, {end}) of a tensor of {full.tensor.numel()}",
            )
            return None
        full.parts.append((begin, end, rank))
        return _bits(full.tensor).view(-1)[begin:end]

    def finish(self) -> dict[int, dict[Any, Any]]:
        for (index, name), full in self.full.items():
            covered = 0
            for begin, end, rank in sorted(part for part in full.parts if part[0] < part[1]):
                if begin != covered:
                    how = "overlap" if begin < covered else "leave a hole"
                    self._report(
                        index,
                        name,
                        f"the parts {how} at element {min(begin, covered)}: rank {rank} has "
                        f"[{begin}, {end}), expected one that begins at {covered}",
                    )
                covered = max(covered, end)
            if covered != full.tensor.numel():
                self._report(
                    index,
                    name,
                    f"the parts end at element {covered}, expected {full.tensor.numel()}",
                )
        if self.problem is not None:
            raise ValueError(self.problem)
        return {index: self.state[index] for index in sorted(self.state)}

    def _report(self, index: int, name: Any, problem: str) -> None:
        if self.problem is None:
            self.problem = f"{_CONSOLIDATING}: parameter {index} [{name!r}]: {problem}"


# ---- torch.distributed ---------------------------------------------------------------------------


def _send(data: Tensor, to: int, group: dist.ProcessGroup) -> None:
    with collective(_CONSOLIDATING):
        wait(dist.isend(data, group=group, group_dst=to))


def _receive(data: Tensor, source: int, group: dist.ProcessGroup) -> None:
    with collective(_CONSOLIDATING):
        wait(dist.irecv(data, group=group, group_src=source))


def _send_text(text: str, to: int, group: dist.ProcessGroup) -> None:
    data, device = text_bytes(text), comm_device(group)
    _send(torch.tensor([data.numel()], device=device), to, group)
    _send(data.to(device), to, group)


def _receive_text(source: int, group: dist.ProcessGroup) -> str:
    length = torch.empty(1, dtype=torch.int64, device=comm_device(group))
    _receive(length, source, group)
    data = torch.empty(int(length), dtype=torch.uint8, device=length.device)
    _receive(data, source, group)
    return bytes_text(data.cpu())

"""Communication among the ranks of one process group outside of a step.

Ranks compare descriptions that must be the same, and gather optimizer state on one rank. Ranks are
ranks of the group. Tensors are sent as bytes, because gloo does not know every dtype.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchopt_ext.state.collective import (
    all_gather,
    all_gather_text,
    collective,
    comm_device,
    raise_together,
    wait,
)
from torchopt_ext.zero import metadata
from torchopt_ext.zero.part import view_in
from torchopt_ext.zero.ranks import MAX_PACKED_BYTES, batches, flat_memory

_CONSOLIDATING = "consolidating the optimizer state"


def check_same(descriptions: Sequence[str], what: str, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank unless all ranks have the same descriptions.

    The error names the first position, and what each rank has there. If the descriptions are the
    same, ranks exchange only a count and a digest.
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
            # Group ranks by description, because there may be hundreds of ranks.
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
    """One value of the optimizer state, or this rank's part of a tensor that several ranks hold."""

    index: int  # of the parameter in the state dict
    name: Any
    value: Any  # what metadata.encode takes; with `whole` the elements from `begin` on, 1-D
    whole: Tensor | None = None  # with the shape and strides of the full tensor
    begin: int = 0  # in the order in which elements lie in memory


def gather_entries(
    entries: Sequence[Entry], to: int, group: dist.ProcessGroup
) -> dict[int, dict[Any, Any]] | None:
    """Gathers the entries of all ranks on rank `to`. All ranks call it.

    In addition to the result, a rank needs memory for one message (MAX_PACKED_BYTES) and for one
    tensor that is not dense.

    Returns:
        On rank `to`, ``{index: {name: value}}`` by ascending index; None on other ranks. Names are
        in the order of the lowest rank that has the index. Tensors are on the CPU in separate
        memory. Dense tensors keep their strides. If several ranks have a value without `whole`, the
        result has the lowest rank's value.

    Raises:
        RuntimeError: an entry cannot be sent (every rank raises), or a rank died or is late.
        ValueError: the parts of a tensor do not make up all of it (every rank raises).
    """
    header, tensors, error = "", list[Tensor](), None
    try:
        header, tensors = _described(entries)
    except Exception as problem:  # any exception: the other ranks must not wait for this rank
        error = f"{_CONSOLIDATING}: {problem}"
    raise_together(error, group)
    headers = all_gather_text(header, group, _CONSOLIDATING)
    rank = dist.get_rank(group)
    state, wanted = _result(headers, "cpu" if rank == to else "meta")
    with collective(_CONSOLIDATING):
        for source, of_rank in enumerate(wanted):
            places = [place for _, place in of_rank]
            if source == rank:
                own = [tensors[number] for number, _ in of_rank]
                if rank == to:
                    for tensor, place in zip(own, places, strict=True):
                        place.copy_(_memory(tensor))
                else:
                    _send(own, to, group)
            elif rank == to:
                _receive(places, source, group)
    return {index: state[index] for index in sorted(state)} if rank == to else None


def _described(entries: Sequence[Entry]) -> tuple[str, list[Tensor]]:
    """Returns a header that tells all ranks what this rank has, and the tensors it describes."""
    described, tensors = [], list[Tensor]()
    for entry in entries:
        where, full = f"state of parameter {entry.index} [{entry.name!r}]", None
        text, own = metadata.encode({entry.name: entry.value}, where)
        if entry.whole is not None:
            if not isinstance(entry.value, Tensor):
                kind = type(entry.value).__name__
                raise TypeError(f"{where}: is of type {kind}, expected a tensor, as a part of one")
            like = view_in(torch.empty(entry.whole.numel(), device="meta"), 0, entry.whole)
            full = like.shape, like.stride()
        for tensor in own:
            # Subclasses and sparse tensors keep their bytes elsewhere.
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
        # The layout is torch.clone's: dense tensors keep their strides.
        layouts = [(t.dtype, t.shape, torch.empty_like(t, device="meta").stride()) for t in own]
        described.append((entry.index, entry.name, full, entry.begin, text, layouts))
        tensors += own
    return metadata.encode(described, "header")[0], tensors


def _send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup) -> None:
    device = comm_device(group)
    for batch in batches(tensors):
        data = [_memory(tensor) for tensor in batch]
        packed = data[0] if len(data) == 1 else torch.cat([memory.to(device) for memory in data])
        for piece in torch.split(packed, MAX_PACKED_BYTES):
            wait(dist.isend(piece.to(device), group=group, group_dst=to))


def _receive(places: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    device = comm_device(group)
    for batch in batches(places):
        sizes = [place.numel() for place in batch]
        packed = batch[0] if len(batch) == 1 else batch[0].new_empty(sum(sizes))
        for piece in torch.split(packed, MAX_PACKED_BYTES):
            received = piece if device.type == "cpu" else torch.empty_like(piece, device=device)
            wait(dist.irecv(received, group=group, group_src=source))
            piece.copy_(received)
        if len(batch) > 1:
            torch._foreach_copy_(batch, list(torch.split(packed, sizes)))


def _memory(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor in the layout of torch.clone."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = flat_memory(tensor)
    if flat is None:
        flat = flat_memory(tensor.clone())
        assert flat is not None
    return flat


def _result(
    headers: Sequence[str], device: str
) -> tuple[dict[int, dict[Any, Any]], list[list[tuple[int, Tensor]]]]:
    """Builds the state that the headers of all ranks describe, with unfilled tensors on ``device``.

    Returns:
        The state, and for each rank the numbers of its wanted tensors with the bytes to fill.
    """
    state: dict[int, dict[Any, Any]] = {}
    kinds: dict[str, str] = {}
    memory: dict[str, list[Tensor]] = {}
    runs: dict[str, list[tuple[int, int]]] = {}  # the parts' ranges of bytes
    wanted: list[list[tuple[int, Tensor]]] = []
    for rank, header in enumerate(headers):
        wanted.append([])
        number = 0
        for index, name, full, begin, text, layouts in metadata.decode(header, ()):
            where, kind = f"{_CONSOLIDATING}: parameter {index} [{name!r}]", "all of it"
            places, run = [], None
            if full is not None:
                ((dtype, (count,), _),) = layouts
                kind = f"a part of it, of {dtype} and shape {full[0]}"
                run = begin * dtype.itemsize, (begin + count) * dtype.itemsize
                layouts = [(dtype, *full)]
            if kinds.setdefault(where, kind) != kind:
                raise ValueError(f"{where}: rank {rank} has {kind}, a lower rank {kinds[where]}")
            if where not in memory:
                tensors = [
                    torch.empty_strided(s, st, dtype=d, device=device) for d, s, st in layouts
                ]
                state.setdefault(index, {}).update(metadata.decode(text, tensors))
                places = memory[where] = [_memory(tensor) for tensor in tensors]
            if run is not None:
                runs.setdefault(where, []).append(run)
                places = [memory[where][0][slice(*run)]]
            wanted[-1] += [(number + i, place) for i, place in enumerate(places) if place.numel()]
            number += len(layouts)
    for where, found in runs.items():
        found.sort()
        nbytes = memory[where][0].numel()
        if [0, *(end for _, end in found)] != [*(begin for begin, _ in found), nbytes]:
            raise ValueError(f"{where}: ranks have bytes {found}, expected all {nbytes} once")
    return state, wanted

"""Communication among the ranks of one process group outside of a step.

Ranks compare descriptions that must be the same, and gather optimizer state on one rank. Ranks are
ranks of the group. Tensors are sent as bytes, because gloo does not know every dtype. All else is
JSON: unlike pickle, reading it runs no code. None, bool, int, float, str and list are JSON's own.
Any other value is an object with one key that names its type, e.g. ``{"tuple": [1, 2]}``.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchopt_ext.state.collective import (
    all_gather,
    all_gather_json,
    all_gather_text,
    collective,
    comm_device,
    compared,
    raise_together,
    wait,
)
from torchopt_ext.zero.part import Part, in_memory_order, view_in
from torchopt_ext.zero.ranks import MAX_PACKED_BYTES, batches, flat_memory

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_CONSOLIDATING = "consolidating the optimizer state"


def encode(value: Any, where: str) -> tuple[str, list[Tensor]]:
    """Encodes nested plain values as text. Returns it, and the tensors that it numbers.

    torch.Size arrives as a tuple, OrderedDict and defaultdict as a dict. Other types, also
    subclasses, raise TypeError, which says ``where``: "state of parameter 3".
    """
    tensors: list[Tensor] = []

    def coded(value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if kind is list:
            return [coded(item) for item in value]
        if kind in (tuple, torch.Size):
            return {"tuple": [coded(item) for item in value]}
        if kind in (dict, OrderedDict, defaultdict):
            return {"dict": [[coded(key), coded(item)] for key, item in value.items()]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (torch.dtype, torch.device):
            return {kind.__name__: str(value)}
        raise TypeError(
            f"{where}: cannot send a {kind.__qualname__}; state may hold tensors, numbers, "
            f"strings, lists, tuples, dicts"
        )

    return json.dumps(coded(value), ensure_ascii=False), tensors


def decode(text: str, tensors: Sequence[Any]) -> Any:
    """Decodes text from :func:`encode`, with ``tensors`` in place of the encoded tensors."""
    decoders: dict[str, Any] = {
        "tensor": tensors.__getitem__,
        "tuple": tuple,
        "dict": dict,
        "complex": lambda parts: complex(*parts),
        "dtype": DTYPES.__getitem__,
        "device": torch.device,
    }

    def value_of(pairs: list[tuple[str, Any]]) -> Any:
        ((tag, content),) = pairs
        return decoders[tag](content)

    return json.loads(text, object_pairs_hook=value_of)


def check_same(descriptions: Sequence[str], what: str, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank unless all ranks have the same descriptions.

    The error names the first position, and what each rank has there. If the descriptions are the
    same, ranks exchange only a count and a digest.
    """
    purpose = f"comparing the {what} of the ranks"
    mine = torch.tensor([len(descriptions), compared(list(descriptions))])
    first, *others = all_gather(mine, group, purpose)
    if all(torch.equal(first, other) for other in others):
        return
    lists: list[list[str]] = all_gather_json(list(descriptions), group, purpose)
    for position, of_ranks in enumerate(zip_longest(*lists)):
        if len(set(of_ranks)) > 1:
            # Group ranks by description, because there may be hundreds of ranks.
            ranks: dict[str | None, list[str]] = {}
            for rank, description in enumerate(of_ranks):
                ranks.setdefault(description, []).append(str(rank))
            has = [f"{d or 'nothing'} on rank {', '.join(of)}" for d, of in ranks.items()]
            raise ValueError(
                f"the ranks differ in their {what}, expected the same in the same order; first at "
                f"position {position}: {'; '.join(has)}"
            )


def gather_entries(
    entries: Sequence[tuple[int, Any, Part, Any]], to: int, group: dist.ProcessGroup
) -> dict[int, dict[Any, Any]] | None:
    """Gathers state entries (parameter's index, name, this rank's part, value) on rank `to`.

    In addition to the result, a rank needs memory for one message (MAX_PACKED_BYTES) and for its
    tensors that are not dense.

    Returns:
        On rank `to`, ``{index: {name: value}}`` by ascending index; None on other ranks. Tensors
        are on the CPU in separate memory; dense ones keep their strides. Of a value that parts do
        not divide, the result has the lowest rank's.

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
    rank, device = dist.get_rank(group), comm_device(group)
    state, places = _result(headers, "cpu" if rank == to else "meta")
    with collective(_CONSOLIDATING):
        for source, of_source in groupby(places, itemgetter(0)):
            if rank not in (source, to):
                continue
            pieces: list[Tensor] = []
            for _, number, place in of_source:
                if source == rank == to:
                    place.copy_(_memory(tensors[number]))
                else:
                    memory = _memory(tensors[number]) if source == rank else place
                    pieces += torch.split(memory, MAX_PACKED_BYTES)
            for batch in batches(pieces):
                sizes = [piece.numel() for piece in batch]
                if source == rank:
                    packed = torch.cat([b.to(device) for b in batch]) if batch[1:] else batch[0]
                    wait(dist.isend(packed.to(device), group=group, group_dst=to))
                    continue
                in_place = device.type == "cpu" and not batch[1:]
                packed = batch[0] if in_place else batch[0].new_empty(sum(sizes), device=device)
                wait(dist.irecv(packed, group=group, group_src=source))
                if not in_place:
                    torch._foreach_copy_(batch, torch.split(packed, sizes))
    return {index: state[index] for index in sorted(state)} if rank == to else None


def _described(entries: Sequence[tuple[int, Any, Part, Any]]) -> tuple[str, list[Tensor]]:
    """Returns a header that tells all ranks what this rank has, and the tensors it describes."""
    described, tensors = [], list[Tensor]()
    for index, name, part, value in entries:
        where = f"state of parameter {index} [{name!r}]"
        if is_part := part.divides(value):
            value = in_memory_order(value, part.tensor)
        text, held = encode({name: value}, where)
        for tensor in held:
            # Subclasses and sparse tensors keep their bytes elsewhere.
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if not plain or tensor.is_meta or tensor.is_quantized:
                raise TypeError(
                    f"{where}: cannot send a {type(tensor).__name__} of layout {tensor.layout} on "
                    f"{tensor.device}; tensors must be plain and dense"
                )
        # The layout is torch.clone's: dense tensors keep their strides.
        layouts = [(t.dtype, t.shape, torch.empty_like(t, device="meta").stride()) for t in held]
        kind, span = "all of it", None
        if is_part:
            like = view_in(torch.empty(part.like.numel(), device="meta"), 0, part.like)
            kind = f"a part of it, of {value.dtype} and shape {tuple(like.shape)}"
            span = [end * value.dtype.itemsize for end in (part.begin, part.end)]
            layouts = [(value.dtype, like.shape, like.stride())]
        described.append((index, name, kind, span, text, layouts))
        tensors += held
    return encode(described, "header")[0], tensors


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
) -> tuple[dict[int, dict[Any, Any]], list[tuple[int, int, Tensor]]]:
    """Builds the state that the headers of all ranks describe, with unfilled tensors on ``device``.

    Returns:
        The state; and for each tensor to send its rank, its number there, and the bytes to fill.
    """
    state: dict[int, dict[Any, Any]] = {}
    kinds: dict[str, str] = {}
    memory: dict[str, list[Tensor]] = {}
    ranges: dict[str, list[tuple[int, int]]] = {}  # of bytes, which parts fill
    sent: list[tuple[int, int, Tensor]] = []
    for rank, header in enumerate(headers):
        number = 0
        for index, name, kind, span, text, layouts in decode(header, ()):
            where, places = f"{_CONSOLIDATING}: parameter {index} [{name!r}]", []
            if kinds.setdefault(where, kind) != kind:
                raise ValueError(f"{where}: rank {rank} has {kind}, a lower rank {kinds[where]}")
            if where not in memory:
                tensors = [
                    torch.empty_strided(s, st, dtype=d, device=device) for d, s, st in layouts
                ]
                state.setdefault(index, {}).update(decode(text, tensors))
                places = memory[where] = [_memory(tensor) for tensor in tensors]
            if span is not None:
                ranges.setdefault(where, []).append(tuple(span))
                places = [memory[where][0][slice(*span)]]
            sent += [(rank, number + i, place) for i, place in enumerate(places) if place.numel()]
            number += len(layouts)
    for where, spans in ranges.items():
        spans.sort()
        nbytes = memory[where][0].numel()
        if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), nbytes]:
            raise ValueError(f"{where}: ranks have bytes {spans}, expected all {nbytes} once")
    return state, sent

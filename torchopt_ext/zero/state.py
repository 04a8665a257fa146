"""State dicts of a sharded optimizer, whole and as distributed checkpoints (DCP).

Their keys and shapes are the unsharded optimizer's, so any world size, either partition and the
unsharded optimizer can load them. In a checkpoint every rank writes and reads its own parts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader

from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.collective import all_gather_text, fail_together
from torchopt_ext.optim.hooks import run_hooks
from torchopt_ext.optim.quantized import CODES, can_quantize
from torchopt_ext.optim.storage import Storage
from torchopt_ext.statedict import dcp
from torchopt_ext.statedict.entries import CONTROL_KEY, control_entry, converted
from torchopt_ext.statedict.loaded import (
    Loaded,
    Slot,
    largest_step,
    load_whole,
    names_params,
    raise_problems,
    read_indexed,
    undone_if_raised,
)
from torchopt_ext.statedict.low_bit import dequantized
from torchopt_ext.statedict.moments import fit_moments, has_codes
from torchopt_ext.zero import local_optimizer
from torchopt_ext.zero.exchange import Entry, gather_entries
from torchopt_ext.zero.functional import FunctionalFused
from torchopt_ext.zero.local_optimizer import local_parts
from torchopt_ext.zero.part import Part, in_memory_order
from torchopt_ext.zero.ranks import bounded
from torchopt_ext.zero.state_shard import StateShard

if TYPE_CHECKING:
    from torchopt_ext.zero.optimizer import ZeroRedundancyOptimizer

Pieces = dict[int, dict[str, list[tuple[Part, Any]]]]
"""A rank's state by parameter index and entry name: the rank's parts and their values."""


def local_state(zero: ZeroRedundancyOptimizer) -> tuple[Pieces, dict[str, Any]]:
    """Returns this rank's state, and the further top-level entries of its state dict.

    The entries include the control block, because a rank without parameters has one, too.
    """
    parts = local_parts(zero)
    numbers = {part.tensor: number for number, part in enumerate(parts)}
    for key in [key for key, entry in zero.optim.state.items() if entry == {}]:
        del zero.optim.state[key]  # a lookup has made it, perhaps of another rank's parameter
    if hasattr(zero.optim, "state_dict"):
        extra = dict(zero.optim.state_dict())
        state = extra.pop("state")
        del extra["param_groups"]
    else:  # a functional optimizer
        extra, state = {}, {numbers[param]: entry for param, entry in zero.optim.state.items()}
    if isinstance(zero.optim, FusedOptimizer):
        extra[CONTROL_KEY] = control_entry(zero.optim.saved_control())
    index_of = {param: index for index, param in enumerate(zero._all_params)}
    pieces: Pieces = {}
    for number, part in enumerate(parts):
        for name, value in (state.get(number) or {}).items():
            if name != CONTROL_KEY:
                own = pieces.setdefault(index_of[part.param], {})
                own.setdefault(name, []).append((part.of_entry(name), value))
    return pieces, extra


def consolidated(zero: ZeroRedundancyOptimizer, to: int) -> tuple[Any, ...]:
    """Gathers all state on rank ``to``, by parameter index, and further entries; () elsewhere."""
    with fail_together(zero.process_group):
        pieces, extra = local_state(zero)
    entries = []
    for index, own in pieces.items():
        for name, of_name in own.items():
            for part, value in of_name:
                entry = Entry(index, name, value)
                if part.divides(value):
                    entry.whole, entry.begin = part.param, part.begin
                    entry.value = in_memory_order(value, part.tensor)
                entries.append(entry)
    gathered = gather_entries(entries, to, zero.process_group)
    return () if gathered is None else (gathered, extra)


def packed(
    zero: ZeroRedundancyOptimizer, state: Mapping[int, dict[str, Any]], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the state dict that the unsharded optimizer would return."""
    copied = {index: dict(entry) for index, entry in state.items()}
    if extra.get(CONTROL_KEY) and copied:
        copied[min(copied)][CONTROL_KEY] = extra[CONTROL_KEY]
    others = {key: value for key, value in extra.items() if key != CONTROL_KEY}
    return {"state": copied, "param_groups": numbered(zero.param_groups), **others}


def numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns param groups as in a state dict, with parameters numbered across groups."""
    numbers = count()
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": list(islice(numbers, len(group["params"])))}
        for group in groups
    ]


def _decoded(slot: Slot) -> Slot:
    """Decodes moments if the parameter cannot hold codes: float moments can be cut anywhere.

    Raises:
        ValueError: the codes are only a rank's part of the parameter's codes.
    """
    if can_quantize(slot.param) or not has_codes(slot.entry):
        return slot
    if any(isinstance(value, StateShard) for value in slot.entry.values()):
        raise ValueError(
            f"{slot.called('exp_avg_codes')} belongs to 8-bit moments, which the parameter cannot "
            f"have here: consolidate the state dict before"
        )
    return replace(slot, entry=fit_moments(slot.entry, slot.param, quantizes=False))


def load(zero: ZeroRedundancyOptimizer, state_dict: dict[str, Any]) -> None:
    """Checks an unsharded state dict and copies this rank's part into the local optimizer."""
    with fail_together(zero.process_group):
        parts = local_parts(zero)
        hooked = run_hooks(zero, "load_state_dict_pre", state_dict.copy())
        loaded = read_indexed(hooked, zero.param_groups)
        if isinstance(zero.optim, FusedOptimizer):
            loaded.slots = [*map(dequantized, loaded.slots)]
        raise_problems(loaded.problems(zero.optim, parts=True))
        owned = {part.param: part for part in parts}
        slot_of = {slot.param: _decoded(slot) for slot in loaded.slots if slot.param in owned}
        if names_params(hooked):  # torch's functions know nothing of other ranks and of parts
            fused = isinstance(zero.optim, FusedOptimizer) and hooked["state"]
            lost = [p for p, slot in slot_of.items() if p.requires_grad and not slot.entry]
            if lost := [p for p in lost if fused or zero.optim.state.get(owned[p].tensor)]:
                raise ValueError(
                    f"{slot_of[lost[0]].called('the state')} is missing ({len(lost)} in all). "
                    "set_optimizer_state_dict loads what this rank saved, nested, by strict=False; "
                    "load_state_dict and torchopt_ext.statedict.dcp.load load a whole state"
                )
        slots = []
        for part in parts:
            slot = slot_of[part.param]
            entry = {}
            for name, value in slot.entry.items():
                own = part.of_entry(name)
                entry[name] = value.of_part(own) if isinstance(value, StateShard) else own.of(value)
            slots.append(replace(slot, param=part.tensor, entry=entry))
    groups = [
        {key: value for key, value in group.items() if key != "param_names" or key in own}
        | {key: own[key] for key in ("params", "param_names") if key in own}
        for group, own in zip(loaded.groups, zero.optim.param_groups, strict=True)
    ]
    is_fused = isinstance(zero.optim, FusedOptimizer)  # its step count is the same on all ranks
    before = largest_step(zero.optim.state.values()) if is_fused else 0
    has_state = any(slot.entry for slot in slots)
    text = json.dumps([loaded.control, loaded.counted, before, has_state])
    of_ranks = [json.loads(t) for t in all_gather_text(text, zero.process_group)]
    controls, counted, made, have_state = zip(*of_ranks, strict=True)
    control: dict[str, Any] = next(filter(None, controls), {})
    with undone_if_raised(zero), undone_if_raised(zero.optim):  # also if another rank raises
        with fail_together(zero.process_group):
            if is_fused:
                fields = zero.optim.control_to_load(control, max(counted), max(made))
                zero.optim.take_loaded(Loaded(slots, groups), fields)
            elif hasattr(zero.optim, "load_state_dict"):
                state = {number: slot.entry for number, slot in enumerate(slots) if slot.entry}
                local = {"state": state, "param_groups": numbered(groups)}
                load_whole(zero.optim, loaded.extra | local)
            else:  # a functional optimizer; torch's keep their step counts on the CPU
                at = None if isinstance(zero.optim, FunctionalFused) else "cpu"
                zero.optim.state = {
                    slot.param: {
                        name: converted(name, value, slot.param, Storage(), at)
                        for name, value in slot.entry.items()
                    }
                    for slot in slots
                    if slot.entry
                }
                local_optimizer.copy_settings(groups, zero.optim.param_groups)
            local_optimizer.sync(zero)
            zero._consolidated, zero._has_state = None, any(have_state)
        with fail_together(zero.process_group):  # only now: a hook may communicate
            run_hooks(zero, "load_state_dict_post")


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


@bounded
def sharded_state_dict(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Returns this rank's part of a ZeroRedundancyOptimizer's state dict. Call it on all ranks.

    ``dcp.save({"optimizer": zero}, checkpoint_id=...)`` saves the same. In addition, this function
    raises on all ranks if one rank has an entry that DCP would not restore.

    Raises:
        TypeError: DCP would not restore an entry of this rank unchanged; names the entry.
        ValueError: another rank has such an entry; names the rank and the entry.
    """
    with fail_together(zero.process_group):
        return sharded(zero, elsewhere=False)


def sharded(zero: ZeroRedundancyOptimizer, *, elsewhere: bool) -> dict[str, Any]:
    """Builds the result of :func:`sharded_state_dict` on this rank alone; tensors are StateShards.

    Args:
        elsewhere: another rank gives the whole tensors to DCP.
    """
    pieces, extra = local_state(zero)
    state = {
        index: {name: joined(of_name, elsewhere) for name, of_name in own.items()}
        for index, own in sorted(pieces.items())
    }
    # Every rank's first parameter has the control block's fields, which all ranks read.
    result: dict[str, Any] = dcp.storable(packed(zero, state, extra))
    return result


def joined(pieces: Sequence[tuple[Part, Any]], elsewhere: bool = False) -> Any:
    """Joins one entry's values from this rank's parts of a parameter into one value for DCP."""
    part, value = pieces[0]
    if isinstance(value, Tensor) and value.dim() and (part.is_whole or part.divides(value)):
        return StateShard.of(pieces, elsewhere)
    return value


@bounded
@torch.no_grad()
def load_sharded(
    zero: ZeroRedundancyOptimizer,
    checkpoint: str | os.PathLike[str] | StorageReader,
    key: str = "optimizer",
) -> None:
    """Loads a ZeroRedundancyOptimizer from a distributed checkpoint. Call it on all ranks.

    The call is ``load({key: zero})`` of :mod:`torchopt_ext.statedict.dcp`.

    Args:
        zero: the ZeroRedundancyOptimizer.
        checkpoint: a folder, or a reader of another storage.
        key: the key under which the optimizer was saved.

    Raises:
        ValueError: groups, shapes or keys do not fit; all ranks raise, naming the parameter or key.
        RuntimeError: a rank cannot read its parts. All ranks raise.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else dcp.Reader(checkpoint)
    dcp.load({key: zero}, storage_reader=reader, process_group=zero.process_group)


def buffers(zero: ZeroRedundancyOptimizer, ids: list[str]) -> dcp.Buffers:
    """Returns what this rank reads into: its parts of parameters, nothing for other parameters."""
    of_id = zip(ids, zero._all_params, strict=False)
    params: dict[dcp.Path, Tensor] = {("state", i): param for i, param in of_id}
    parts: dict[Tensor, list[Part]] = {}
    for part in local_parts(zero):
        parts.setdefault(part.param, []).append(part)

    def buffer(path: dcp.Path, like: Tensor) -> Tensor:
        param = params.get(path[:2])
        if param is not None and param not in parts and len(path) == 3:
            return like
        if param is None or path[-1] == "step" or len(path) > 3:
            return torch.empty(like.shape, dtype=like.dtype)
        own = [part.of_entry(path[-1]) for part in parts[param]]
        # Codes that the parameter cannot hold are read whole, to be decoded.
        whole = path[-1] in CODES and not can_quantize(param)
        if whole or like.shape != own[0].param.shape:
            return torch.empty(like.shape, dtype=like.dtype)
        return joined(
            [(p, torch.empty_like(p.tensor, dtype=like.dtype, device=param.device)) for p in own]
        )

    return buffer

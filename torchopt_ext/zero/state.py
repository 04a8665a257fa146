"""The state dict of a sharded optimizer, whole and as this rank's part of a checkpoint (DCP).

Their keys and shapes are the unsharded optimizer's, so any world size, either partition and the
unsharded optimizer can load them. In a checkpoint every rank writes and reads its own parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import GET_STATE, is_called_by
from torchopt_ext.state.collective import all_gather_json, fail_together
from torchopt_ext.state.entries import CONTROL_KEY, control_entry
from torchopt_ext.state.matrices import without_functions
from torchopt_ext.state.params import params_of
from torchopt_ext.state.quantized import CODES, can_quantize, fit_moments, has_codes
from torchopt_ext.statedict import dcp
from torchopt_ext.statedict.loaded import (
    Loaded,
    Slot,
    largest_step,
    load_whole,
    names_params,
    raise_problems,
    read_indexed,
)
from torchopt_ext.statedict.low_bit import dequantized, with_step
from torchopt_ext.zero.exchange import gather_entries
from torchopt_ext.zero.local_optimizer import LocalOptimizer
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.state_shard import StateShard

Pieces = dict[int, dict[str, list[tuple[Part, Any]]]]
"""A rank's state by parameter index and entry name: the rank's parts and their values."""


def local_state(local: LocalOptimizer) -> tuple[Pieces, dict[str, Any]]:
    """Returns this rank's state, and the further entries of its state dict, as the control block
    that a rank without parameters has, too."""
    parts, optimizer = local.parts, local.optimizer
    for key in [key for key, entry in optimizer.state.items() if entry == {}]:
        del optimizer.state[key]  # a lookup has made it, perhaps of another rank's parameter
    extra = dict(optimizer.state_dict())
    state = extra.pop("state")
    del extra["param_groups"]
    if local.is_fused:
        extra[CONTROL_KEY] = control_entry(optimizer._saved_control())
    index_of = {param: index for index, param in enumerate(params_of(local.params))}
    pieces: Pieces = {}
    for number, part in enumerate(parts):
        for name, value in (state.get(number) or {}).items():
            if name != CONTROL_KEY and not part.is_empty:
                by_name = pieces.setdefault(index_of[part.param], {})
                by_name.setdefault(name, []).append((part.of_entry(name), value))
    return pieces, extra


def consolidated(local: LocalOptimizer, to: int) -> tuple[Any, ...]:
    """Gathers all state on rank ``to``, by parameter index, and further entries; () elsewhere."""
    with fail_together(local.ranks.group):
        pieces, extra = local_state(local)
    entries = [
        (index, name, part, value)
        for index, by_name in pieces.items()
        for name, of_name in by_name.items()
        for part, value in of_name
    ]
    gathered = gather_entries(entries, to, local.ranks.group)
    return () if gathered is None else (gathered, extra)


def packed(
    groups: list[dict[str, Any]], state: Mapping[int, dict[str, Any]], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the state dict that the unsharded optimizer would return."""
    copied = {index: dict(entry) for index, entry in state.items()}
    if extra.get(CONTROL_KEY) and copied:
        copied[min(copied)][CONTROL_KEY] = extra[CONTROL_KEY]
    others = {key: value for key, value in extra.items() if key != CONTROL_KEY}
    keep_keys = is_called_by(GET_STATE, 6)  # the setter looks for the keys that groups have
    saved = [without_functions(group, keep_keys) for group in numbered(groups)]
    return {"state": copied, "param_groups": saved, **others}


def numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns param groups as in a state dict, with parameters numbered across groups."""
    numbers = count()
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": list(islice(numbers, len(group["params"])))}
        for group in groups
    ]


def _decoded(slot: Slot) -> Slot:
    """Decodes moments if the parameter cannot hold codes: float moments can be cut anywhere."""
    if can_quantize(slot.param) or not has_codes(slot.entry):
        return slot
    if any(isinstance(value, StateShard) for value in slot.entry.values()):
        raise ValueError(
            f"{slot.called('exp_avg_codes')} belongs to 8-bit moments, which the parameter cannot "
            f"have here: consolidate the state dict before"
        )
    return replace(slot, entry=fit_moments(slot.entry, slot.param, quantizes=False))


def read(local: LocalOptimizer, state_dict: Any) -> Loaded:
    """Returns what an unsharded state dict has for this rank's parts; ValueError if it is wrong."""
    parts, optimizer = local.parts, local.optimizer
    local.take_settings()  # the groups' algorithms decide what fits
    local.partition.follow_memory()  # missing masters begin as the parameters' values
    loaded = read_indexed(state_dict, local.params.param_groups)
    if local.is_fused:
        loaded.slots = [with_step(dequantized(slot)) for slot in loaded.slots]
    raise_problems(loaded.problems(optimizer, parts=True))
    owned = {part.param: part for part in parts}
    slot_of = {slot.param: _decoded(slot) for slot in loaded.slots if slot.param in owned}
    if names_params(state_dict):  # torch's functions know nothing of other ranks and of parts
        fused = local.is_fused and state_dict["state"]
        lost = [p for p, slot in slot_of.items() if p.requires_grad and not slot.entry]
        if lost := [p for p in lost if fused or optimizer.state.get(owned[p].tensor)]:
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
            piece = part.of_entry(name)
            is_shard = isinstance(value, StateShard)
            entry[name] = value.of_part(piece) if is_shard else piece.of(value)
        slots.append(replace(slot, param=part.tensor, entry=entry))
    groups = [
        {key: value for key, value in group.items() if key != "param_names" or key in live}
        | {key: live[key] for key in ("params", "param_names") if key in live}
        for group, live in zip(loaded.groups, optimizer.param_groups, strict=True)
    ]
    return replace(loaded, slots=slots, groups=groups)


def commit(local: LocalOptimizer, loaded: Loaded) -> bool:
    """Copies what was read into the local optimizer. Returns whether some rank has state."""
    optimizer, group = local.optimizer, local.ranks.group
    # A fused optimizer's step count is the same on all ranks.
    before = largest_step(optimizer.state.values()) if local.is_fused else 0
    has_state = any(slot.entry for slot in loaded.slots)
    of_ranks = all_gather_json([loaded.control, loaded.counted, before, has_state], group)
    controls, counted, steps, have_state = zip(*of_ranks, strict=True)
    with fail_together(group):
        if local.is_fused:
            control: dict[str, Any] = next(filter(None, controls), {})
            fields = optimizer._control_to_load(control, max(counted), max(steps))
            optimizer._take_loaded(Loaded(loaded.slots, loaded.groups), fields)
        else:
            state = {n: slot.entry for n, slot in enumerate(loaded.slots) if slot.entry}
            part = {"state": state, "param_groups": numbered(loaded.groups)}
            load_whole(optimizer, loaded.extra | part)
        local.sync()
    return any(have_state)


def sharded(local: LocalOptimizer, *, consolidated: bool) -> dict[str, Any]:
    """Returns this rank's part of the state dict; tensors are StateShards.

    ``consolidated``: another rank gives the whole tensors to DCP.
    """
    pieces, extra = local_state(local)
    state = {
        index: {name: joined(of_name, consolidated) for name, of_name in by_name.items()}
        for index, by_name in sorted(pieces.items())
    }
    # Every rank's first parameter has the control block's fields, which all ranks read.
    result: dict[str, Any] = dcp.storable(packed(local.params.param_groups, state, extra))
    return result


def joined(pieces: Sequence[tuple[Part, Any]], elsewhere: bool = False) -> Any:
    """Joins one entry's values from this rank's parts of a parameter into one value for DCP."""
    part, value = pieces[0]
    if isinstance(value, Tensor) and value.dim() and (part.is_whole or part.divides(value)):
        return StateShard.of(pieces, elsewhere)
    return value


def buffers(local: LocalOptimizer, ids: list[str]) -> dcp.Buffers:
    """Returns what this rank reads into: its parts of parameters, nothing for other parameters."""
    of_id = zip(ids, params_of(local.params), strict=False)
    params: dict[dcp.Path, Tensor] = {("state", i): param for i, param in of_id}
    parts: dict[Tensor, list[Part]] = {}
    for part in local.parts:
        parts.setdefault(part.param, []).append(part)

    def buffer(path: dcp.Path, like: Tensor) -> Tensor:
        param = params.get(path[:2])
        if param is not None and param not in parts and len(path) == 3:
            return like
        if param is None or path[-1] == "step" or len(path) > 3:
            return torch.empty(like.shape, dtype=like.dtype)
        if all(part.is_empty for part in parts[param]):
            return like
        pieces = [part.of_entry(path[-1]) for part in parts[param]]
        # Codes that the parameter cannot hold are read whole, to be decoded.
        whole = path[-1] in CODES and not can_quantize(pieces[0].like)
        if whole or like.shape != pieces[0].like.shape:
            return torch.empty(like.shape, dtype=like.dtype)
        return joined(
            [(p, torch.empty_like(p.tensor, dtype=like.dtype, device=param.device)) for p in pieces]
        )

    return buffer

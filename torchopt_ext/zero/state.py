"""State dicts of a sharded optimizer: the unsharded optimizer's, in parts on every rank."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from torchopt_ext.optim import FusedAdam
from torchopt_ext.optim.collective import all_gather_text, all_or_none
from torchopt_ext.optim.storage import Storage
from torchopt_ext.statedict.control import CONTROL_KEY, as_entry
from torchopt_ext.statedict.entries import converted
from torchopt_ext.statedict.loaded import Loaded, raise_problems, read_indexed
from torchopt_ext.statedict.whole import load_whole
from torchopt_ext.zero import local_optimizer
from torchopt_ext.zero.exchange import Entry, gather_entries
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.sharded import ShardedOptimizer
from torchopt_ext.zero.state_shard import StateShard


def local_state_dict(zero: ShardedOptimizer) -> dict[str, Any]:
    """The local optimizer's state dict; functional optimizers only have their state.

    The control block's fields are at the top, as a rank without parameters has them, too.
    """
    mine = {param: number for number, param in enumerate(chain(*zero.parts.mine))}
    for key in [k for k in zero.optim.state if isinstance(k, Tensor) and k not in mine]:
        if not zero.optim.state[key]:  # looking up another rank's parameter has made it
            del zero.optim.state[key]
    if not hasattr(zero.optim, "state_dict"):
        return {"state": {mine[param]: entry for param, entry in zero.optim.state.items()}}
    local = dict(zero.optim.state_dict())
    if isinstance(zero.optim, FusedAdam):
        for entry in local["state"].values():
            if isinstance(entry, dict):
                entry.pop(CONTROL_KEY, None)
        local[CONTROL_KEY] = as_entry(zero.optim.saved_control())
    return local


def local_parts(zero: ShardedOptimizer) -> list[Part]:
    """What this rank's parameters are parts of, in the order in which its state is numbered."""
    return [zero.parts.part_of(param) for param in chain(*zero.parts.mine)]


def consolidated(zero: ShardedOptimizer, to: int) -> dict[str, Any] | None:
    """State and further top-level entries on rank ``to``; None elsewhere."""
    with all_or_none(zero.process_group):
        local = local_state_dict(zero)
    parts = local_parts(zero)
    entries = []
    index_of = local_optimizer.index_of(zero._all_params)
    for number, state in local["state"].items():
        if not isinstance(number, int) or not 0 <= number < len(parts):
            continue  # not a parameter's
        part = parts[number]
        for name, value in (state or {}).items():
            entry = Entry(index_of[part.param], name, value)
            if part.divides(value):
                entry.shape, entry.begin = part.memory_shape, part.begin
                entry.value = part.in_memory_order(value)
            entries.append(entry)
    gathered = gather_entries(entries, to, zero.process_group)
    if gathered is None:
        return None
    params = zero._all_params
    for index, state in gathered.items():
        for name, value in state.items():
            state[name] = zero.parts.in_param_order(params[index], value)
    extra = {key: value for key, value in local.items() if key not in ("state", "param_groups")}
    return {"state": gathered, "extra": extra}


def packed(
    zero: ShardedOptimizer, collected: Mapping[str, Any], first: int | None
) -> dict[str, Any]:
    """The state dict that the unsharded optimizer would give.

    Args:
        collected: "state" by parameter's index, and "extra" top-level entries.
        first: which of the parameters with state is the first on all ranks; None without any.
    """
    groups, count = [], 0
    for group in zero.param_groups:
        saved_group = {key: value for key, value in group.items() if key != "params"}
        saved_group["params"] = list(range(count, count + len(group["params"])))
        count += len(group["params"])
        groups.append(saved_group)
    state = {index: dict(entry) for index, entry in collected["state"].items()}
    extra = dict(collected["extra"])
    fields = extra.pop(CONTROL_KEY, None)
    if fields and first in state:
        state[first][CONTROL_KEY] = fields
    return {"state": state, "param_groups": groups} | extra


def of_part(value: Any, part: Part) -> Any:
    """A part of a loaded entry, which is the parameter's or this rank's."""
    return value.of_part(part) if isinstance(value, StateShard) else part.of(value)


def check(zero: ShardedOptimizer, state_dict: Mapping[str, Any]) -> Loaded:
    """The unsharded state dict as it was read; raises ValueError unless it fits."""
    loaded = read_indexed(state_dict, zero.param_groups)
    raise_problems(loaded.problems(zero.optim))
    return loaded


def load(zero: ShardedOptimizer, loaded: Loaded) -> None:
    """Lets the local optimizer continue with this rank's part of a checked, unsharded state dict.

    It is copied.
    """
    local_groups, first = [], 0
    for group, own in zip(loaded.groups, zero.parts.mine, strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        local_groups.append(options | {"params": list(range(first, first + len(own)))})
        first += len(own)
    entry_of = {slot.param: slot.entry for slot in loaded.slots}
    with all_or_none(zero.process_group):
        state = {
            number: {name: of_part(value, part) for name, value in entry_of[part.param].items()}
            for number, part in enumerate(local_parts(zero))
            if entry_of[part.param]
        }
    control = {CONTROL_KEY: loaded.control}
    local = {**loaded.extra, **control, "state": state, "param_groups": local_groups}
    is_fused = isinstance(zero.optim, FusedAdam)
    if is_fused:  # which has the same counts on all ranks
        loaded = read_indexed(local, zero.optim.param_groups)
        mine = json.dumps([loaded.control, loaded.counted])
        found = [json.loads(text) for text in all_gather_text(mine, zero.process_group)]
        loaded.control = next((control for control, _ in found if control), {})
        counted = max(counted for _, counted in found)
    before = zero.optim.state, zero.optim.param_groups
    try:
        with all_or_none(zero.process_group):
            if is_fused:
                zero.optim.take_loaded(loaded, counted)
            elif hasattr(zero.optim, "load_state_dict"):
                load_whole(zero.optim, local)
            else:  # a functional optimizer, whose steps torch keeps on the CPU
                (params,) = zero.parts.mine
                zero.optim.state = {
                    params[number]: {
                        name: converted(name, value, params[number], Storage(), "cpu")
                        for name, value in entry.items()
                    }
                    for number, entry in state.items()
                }
                local_optimizer.copy_settings(local_groups, zero.optim.param_groups)
    except Exception:  # maybe another rank's
        zero.optim.state, zero.optim.param_groups = before
        raise
    zero._consolidated = None
    local_optimizer.set_places(zero)
    local_optimizer.sync_groups_from(zero)

"""State dicts of a sharded optimizer: the unsharded optimizer's, in parts on every rank."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext.optim import saved
from torchopt_ext.optim.agreement import all_or_none
from torchopt_ext.optim.base import FusedAdamBase
from torchopt_ext.zero import local_optimizer
from torchopt_ext.zero.elementwise import ELEMENTWISE, is_elementwise
from torchopt_ext.zero.exchange import Entry, gather_entries
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.sharded import ShardedOptimizer


def local_state_dict(zero: ShardedOptimizer) -> dict[str, Any]:
    """The local optimizer's state dict; functional optimizers only have their state."""
    mine = {param: number for number, param in enumerate(chain(*zero.parts.mine))}
    for key in [k for k in zero.optim.state if isinstance(k, Tensor) and k not in mine]:
        if not zero.optim.state[key]:  # looking up another rank's parameter has made it
            del zero.optim.state[key]
    if hasattr(zero.optim, "state_dict"):
        return dict(zero.optim.state_dict())
    return {"state": {mine[param]: entry for param, entry in zero.optim.state.items()}}


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


def packed(zero: ShardedOptimizer, collected: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that the unsharded optimizer would give."""
    groups, first = [], 0
    for group in zero.param_groups:
        saved_group = {key: value for key, value in group.items() if key != "params"}
        saved_group["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
        groups.append(saved_group)
    state = {index: dict(entry) for index, entry in collected["state"].items()}
    return {"state": state, "param_groups": groups} | collected["extra"]


def check(zero: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank alike unless groups, and shapes where known, fit."""
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(f"the state dict's {key!r} is {state_dict.get(key)!r}")
    groups = state_dict["param_groups"]
    if len(groups) != len(zero.param_groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(groups)}, "
            f"expected {len(zero.param_groups)}"
        )
    for number, (group, own) in enumerate(zip(groups, zero.param_groups, strict=True)):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError(f"group {number} of the loaded state dict has no list of params")
        if len(group["params"]) != len(own["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: group {number} has {len(group['params'])} parameters, "
                f"expected {len(own['params'])}"
            )
    ids = [index for group in groups for index in group["params"]]
    required = ELEMENTWISE.get(type(zero.optim), ())
    for index, param in zip(ids, zero._all_params, strict=True):
        entry = state_dict["state"].get(index)
        if entry is None:
            continue
        what = f"parameter {index}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state of {what} is {type(entry).__name__}, expected a dict")
        if missing := [name for name in required if entry and entry.get(name) is None]:
            raise ValueError(f"the state of {what} lacks {', '.join(missing)}")
        for name in required if entry else ():
            if not isinstance(entry[name], Tensor | int | float):
                raise ValueError(
                    f"{name} of {what} is {type(entry[name]).__name__}, expected a tensor"
                )
        if not is_elementwise(type(zero.optim)):
            continue
        for name, value in entry.items():
            scalar = name == "step" or not isinstance(value, Tensor) or value.dim() == 0
            if not scalar and value.shape != param.shape:
                raise ValueError(
                    f"{name} of {what} has shape {tuple(value.shape)}, expected "
                    f"{tuple(param.shape)}"
                )
    if isinstance(zero.optim, FusedAdamBase):
        saved.check_saved(cast(Optimizer, zero), state_dict)


def load(zero: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Hands this rank's part of a checked, unsharded state dict to the local optimizer."""
    groups = state_dict["param_groups"]
    ids = [index for group in groups for index in group["params"]]
    id_of = dict(zip(zero._all_params, ids, strict=True))
    state = {}
    for number, part in enumerate(local_parts(zero)):
        entry = state_dict["state"].get(id_of[part.param])
        if entry is not None:
            state[number] = {name: part.of(value) for name, value in entry.items()}
    extra = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    load_local(zero, groups, state, extra)


def load_local(
    zero: ShardedOptimizer,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
    extra: Mapping[str, Any],
) -> None:
    """Lets the local optimizer continue with loaded groups and state, which are copied.

    Args:
        groups: of the unsharded optimizer, checked.
        state: of this rank's parts, by their place in :func:`local_parts`.
        extra: further top-level entries of the state dict.
    """
    local_groups, first = [], 0
    for group, own in zip(groups, zero.parts.mine, strict=True):
        local = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        local["params"] = list(range(first, first + len(own)))
        first += len(own)
        local_groups.append(local)
    before = zero.optim.state, [dict(group) for group in zero.optim.param_groups]
    try:
        with all_or_none(zero.process_group):
            if hasattr(zero.optim, "load_state_dict"):
                if not isinstance(zero.optim, FusedAdamBase):  # which copies by itself
                    state = {number: own_memory(entry) for number, entry in state.items()}
                zero.optim.load_state_dict(
                    {"state": dict(state), "param_groups": local_groups, **extra}
                )
            else:
                (params,) = zero.parts.mine
                zero.optim.state = {
                    params[number]: {k: fitted(params[number], k, v) for k, v in entry.items()}
                    for number, entry in state.items()
                }
                local_optimizer.copy_settings(local_groups, zero.optim.param_groups)
    except Exception:  # torch's classes may raise after they have taken part of it
        zero.optim.state, zero.optim.param_groups = before
        raise
    zero._consolidated = None
    local_optimizer.set_places(zero)
    local_optimizer.sync_groups_from(zero)


def own_memory(value: Any, depth: int = 0) -> Any:
    """A copy of nested state that shares no tensor with it.

    Raises:
        ValueError: it is nested without an end.
    """
    if depth > 64:
        raise ValueError("a state entry holds itself, or is nested more than 64 deep")
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: own_memory(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own_memory(item, depth + 1) for item in value)
    return value


def fitted(param: Tensor, name: str, value: Any) -> Any:
    """A functional optimizer's state entry: torch keeps its steps on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        return value.detach().to("cpu", torch.float32, copy=True)
    dtype = param.dtype if value.is_floating_point() else value.dtype
    return value.detach().to(param.device, dtype, copy=True)

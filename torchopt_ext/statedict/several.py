"""State dicts of several optimizers as one, and back: torch's Muon and AdamW as FusedMuon."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def join(*state_dicts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dict of one optimizer with the groups of several, in their order.

    Args:
        state_dicts: in torch's layout, with ``state`` by index, such as those of torch.optim.Muon
            and torch.optim.AdamW. Other entries are left out. Tensors are shared.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for each in state_dicts:
        first = sum(len(group["params"]) for group in groups)
        state |= {first + index: entry for index, entry in each["state"].items()}
        groups += [
            {**group, "params": [first + index for index in group["params"]]}
            for group in each["param_groups"]
        ]
    return {"state": state, "param_groups": groups}


def split(state_dict: Mapping[str, Any], groups: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the state dicts of optimizers that have so many groups each: undoes :func:`join`.

    Args:
        state_dict: in torch's layout. Tensors are shared.

    Raises:
        ValueError: the state dict has another number of groups.
    """
    every = state_dict["param_groups"]
    if sum(groups) != len(every):
        raise ValueError(f"the state dict has {len(every)} param groups, expected {sum(groups)}")
    parts, first = [], 0
    for count in groups:
        chosen = every[first : first + count]
        first += count
        number = {old: new for new, old in enumerate(i for g in chosen for i in g["params"])}
        parts.append(
            {
                "state": {number[i]: v for i, v in state_dict["state"].items() if i in number},
                "param_groups": [
                    {**group, "params": [number[i] for i in group["params"]]} for group in chosen
                ],
            }
        )
    return parts


def from_classical(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of Muon with classical momentum, ``m = mu*m + g``, for FusedMuon.

    Such is dion's (dion/muon.py), which calls the buffer ``momentum`` and the factor ``mu``. torch
    and FusedMuon average: ``m = mu*m + (1 - mu)*g``. So the buffer is multiplied by ``1 - mu``.
    Orthogonalization forgets the scale, so training continues as before up to rounding.

    Args:
        state_dict: in torch's layout. Groups of another ``"algorithm"``, and groups without
            ``momentum`` and ``mu``, stay as they are.
    """
    state = dict(state_dict["state"])
    groups = []
    for group in state_dict["param_groups"]:
        mu = group.get("momentum", group.get("mu"))
        groups.append(dict(group))
        if mu is None or group.get("algorithm", "muon") != "muon":
            continue
        groups[-1].pop("mu", None)
        groups[-1]["momentum"] = mu
        for index in group["params"]:
            entry = dict(state.get(index, {}))
            for name in {"momentum", "momentum_buffer"} & entry.keys():
                buffer = entry.pop(name)
                entry["momentum_buffer"] = buffer * (1 - mu) if isinstance(buffer, Tensor) else None
            state[index] = entry
    return {**state_dict, "state": state, "param_groups": groups}

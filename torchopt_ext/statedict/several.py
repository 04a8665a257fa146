"""State dicts of several optimizers as one, and back: torch's Muon and AdamW as FusedMuon.

And state dicts of other implementations of Muon.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.state.algorithms import HYPERS, algorithm_in, algorithm_of, name_algorithm
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.matrices import SETTINGS

__all__ = [
    "from_classical",
    "from_dion",
    "from_keller_jordan",
    "from_nanochat",
    "join",
    "rerouted",
    "split",
]

_KELLER_JORDAN = {"nesterov": True, "weight_decay": 0.0, **SETTINGS}
"""What muon.py of KellerJordan/Muon does unless a group has the key."""
_NANOCHAT = _KELLER_JORDAN | {
    "ns_coefficients": "polar_express",
    "eps": 1e-6,
    "cautious_weight_decay": True,
}
"""What muon_step_fused() of nanochat/optim.py always does, in the keys of a group."""
_DION = {
    "mu": "momentum",
    "muon_beta2": "beta2",
    "epsilon": "eps",
    "cautious_wd": "cautious_weight_decay",
}
"""Keys of groups by dion's names; the others have the same name, or are read one by one."""
_DION_ADJUSTMENTS = {"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw"}
_DION_STATE = {
    "muon": {"momentum": "momentum_buffer", "variance_neuron": "second_momentum_buffer"},
    "adam": {"momentum": "exp_avg", "variance": "exp_avg_sq", "step_dev": "step"},
    "lion": {"momentum": "exp_avg"},
}
"""Entries of each algorithm by dion's names."""


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


def rerouted(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a container's saved state dict for a container that sends parameters elsewhere.

    A parameter that another algorithm steps now begins anew, with the group and moments that
    ``own`` has for it, and a warning names it. Master weights, remainders, and all other parameters
    continue.

    Args:
        saved: flat, as containers have it.
        own: the state dict of the container that is to load the result.
    """
    before, now = _algorithms(saved), _algorithms(own)
    moved = {name for name in now if before.get(name) != now[name]}
    if moved:
        named = (
            f"{n!r} ({_named(before.get(n))}, now {_named(now[n])})" for n in now if n in moved
        )
        warnings.warn(
            "moments and step counts start anew where another algorithm steps a parameter: "
            + ", ".join(named),
            stacklevel=2,
        )

    def begins_anew(key: str) -> bool:
        kind, name, entry = _parts(key)
        return kind in ("state", "param_groups") and name in moved and entry not in MASTERS

    kept = {key: value for key, value in saved.items() if not begins_anew(key)}
    return kept | {key: value for key, value in own.items() if begins_anew(key)}


def _named(algorithm: Any) -> str:
    return "unknown" if algorithm is None else str(algorithm.name)


def _algorithms(flat: Mapping[str, Any]) -> dict[str, Any]:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, name, option = _parts(key)
        if kind == "param_groups":
            groups.setdefault(name, {})[option] = value
    return {name: algorithm_in(group) for name, group in groups.items()}


def _parts(key: str) -> tuple[str, str, str]:
    """Returns kind, parameter's name and entry of a key of a flat state dict."""
    kind, _, rest = key.partition(".")
    name, _, entry = rest.rpartition(".")
    return kind, name, entry


def from_classical(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of Muon with classical momentum, ``m = mu*m + g``, for FusedMuon.

    torch and FusedMuon average: ``m = mu*m + (1 - mu)*g``. So the buffer is multiplied by
    ``1 - mu``. Orthogonalization forgets the scale, so training continues as before up to rounding.

    Args:
        state_dict: in torch's layout. Groups of another ``"algorithm"``, and groups without
            ``momentum``, stay as they are.
    """
    state = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        is_muons = algorithm_of({"algorithm": "muon"} | group).steps_matrices
        for index in group["params"] if is_muons and "momentum" in group else ():
            entry = state.get(index, {})
            if isinstance(entry.get("momentum_buffer"), Tensor):
                average = entry["momentum_buffer"] * (1 - group["momentum"])
                state[index] = {**entry, "momentum_buffer": average}
    return {**state_dict, "state": state}


def from_keller_jordan(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of an optimizer of KellerJordan/Muon (muon.py) for FusedMuon.

    Its momentum is an average since February 2025. Before that, it is a sum: pass the result to
    :func:`from_classical`. A group of matrices holds its parameters sorted by size, largest first.
    """
    groups = []
    for saved in state_dict["param_groups"]:
        group = dict(saved)
        name_algorithm(group)
        groups.append((_KELLER_JORDAN if "momentum" in group else {}) | group)
    return {**state_dict, "param_groups": groups}


def from_nanochat(*ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of nanochat's MuonAdamW (nanochat/optim.py) for FusedMuon.

    The state of a group's first matrix holds stacks of the whole group's. Each matrix gets its own,
    in the order of the group's parameters. nanochat normalizes the columns of a matrix that has
    more columns than rows. FusedMuon normalizes rows: of such a matrix the averages are left out,
    with a warning, and begin anew.

    Three details of nanochat's step are not FusedMuon's. nanochat scales rows before the
    iterations, scales the result to the norm of an orthogonal matrix, and decays weights by the
    learning rate times the factor of the shape.

    Args:
        ranks: what each rank has saved (optim_*_rank*.pt), in the order of ranks.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, saved in enumerate(ranks[0]["param_groups"]):
        group = dict(saved)
        name_algorithm(group)
        of_matrices = group["algorithm"] == "muon"
        groups.append((_NANOCHAT if of_matrices else {}) | group)
        for index in group["params"]:
            entries = [rank["state"].get(index, {}) for rank in ranks]
            for name in entries[0]:
                parts = [entry[name] for entry in entries]
                if not of_matrices:
                    state.setdefault(index, {})[name] = _whole(parts)
                    continue
                stack = torch.cat(parts)  # the last may be padding
                if name == "second_momentum_buffer" and stack.shape[-1] > 1:
                    warnings.warn(f"group {number}: averages of columns are left out", stacklevel=2)
                    continue
                for matrix, own in zip(group["params"], stack, strict=False):
                    state.setdefault(matrix, {})[name] = own
    return {"state": state, "param_groups": groups}


def _whole(parts: Sequence[Any]) -> Any:
    """Returns one of AdamW's entries: each rank has its rows, or all with less than 1,024 elements.

    Few rows of each rank are told from all by their difference.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    is_cut = first.numel() >= 1024 or not all(torch.equal(first, part) for part in parts)
    return torch.cat([*parts]) if is_cut else first


def from_dion(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of dion's Muon or NorMuon, with groups of AdamW and Lion, for FusedMuon.

    Names and meanings are those of muon.py, normuon.py, megabatch_base.py and scalar_opts.py of
    dion/. A state dict of dion has no coefficients of the iterations: those of the optimizer that
    loads the result stay. So does its ``adjust_lr_fn`` where a group has ``adjust_lr=None``.

    Raises:
        ValueError: a group is of another algorithm, such as "dion2".
    """
    state, groups = {}, []
    for saved in state_dict["param_groups"]:
        algorithm = algorithm_of(saved)
        read = {"beta1", "beta2", "step", "adjust_lr"}
        group = {_DION.get(key, key): saved[key] for key in saved if key not in read}
        group["betas"] = (saved["beta1"], saved["beta2"])
        if saved["adjust_lr"] is not None:
            group["adjust_lr_fn"] = _DION_ADJUSTMENTS[saved["adjust_lr"]]
        foreign = HYPERS.difference(algorithm.defaults, {"algorithm"})  # dion's groups have all
        groups.append({key: value for key, value in group.items() if key not in foreign})
        names = _DION_STATE[algorithm.name]
        for index in saved["params"]:
            entry = state_dict["state"].get(index, {})
            held = {names[name]: entry[name] for name in entry if name in names}
            state[index] = {"step": saved["step"]} | held if held else {}
    return from_classical({"state": state, "param_groups": groups})

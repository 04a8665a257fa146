"""State dicts of any optimizer: checked, and loaded whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from torchopt_ext.optim.local import is_dtensor
from torchopt_ext.optim.state import check_shape

SHAPED_LIKE_PARAM = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "ax", "prev", "step_size"),
)
"""Entries of torch.optim's classes that are shaped as their parameter, if they are no numbers."""


def check_structure(states: Any) -> None:
    """Raises ValueError unless ``states`` is made as an optimizer's state dict."""
    if not isinstance(states, Mapping) or not {"state", "param_groups"} <= states.keys():
        raise ValueError(f"a base optimizer's state has 'state' and 'param_groups'; got {states!r}")
    state, groups = states["state"], states["param_groups"]
    good = isinstance(state, Mapping) and isinstance(groups, list | tuple)
    good = good and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if not good or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise ValueError(
            "a base optimizer's 'state' maps indices to dicts, and its 'param_groups' are dicts "
            "with 'params'"
        )


def check(optim: Optimizer, states: Any, names: Sequence[str]) -> None:
    """Raises ValueError unless ``states`` fits the optimizer's groups and parameters."""
    check_structure(states)
    groups, found = optim.param_groups, states["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in found]
    if sizes != saved_sizes:
        raise ValueError(f"the state dict's groups have {saved_sizes} parameters, expected {sizes}")
    params = [param for group in groups for param in group["params"]]
    ids = [index for group in found for index in group["params"]]
    for index, param, name in zip(ids, params, names, strict=True):
        for key, value in (states["state"].get(index) or {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or param.dim() == 0:
                continue
            held = optim.state.get(param, {}).get(key)
            what = f"{key} of parameter {name}"
            torchs = type(optim).__module__.startswith("torch.optim.")
            if (torchs and key in SHAPED_LIKE_PARAM) or is_dtensor(value):
                check_shape(value, param, what)
            elif isinstance(held, Tensor) and held.shape != value.shape:
                raise ValueError(
                    f"{what} has shape {tuple(value.shape)}, expected {tuple(held.shape)}"
                )


def load(optim: Optimizer, states: Mapping[str, Any]) -> None:
    """Loads a copy of ``states``; whatever the optimizer raises, it is then as it was."""
    copied = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), states["state"])
    state, groups = optim.state, optim.param_groups
    contents = [dict(group) for group in groups]
    try:
        optim.load_state_dict({**states, "state": copied})
        for number, (group, before) in enumerate(zip(optim.param_groups, contents, strict=True)):
            if lacking := (optim.defaults.keys() & before.keys()) - group.keys():
                raise ValueError(
                    f"group {number} of the state dict lacks {', '.join(sorted(lacking))}, which "
                    f"{type(optim).__name__} needs: it is another optimizer's"
                )
    except Exception:
        optim.state, optim.param_groups = state, groups
        for group, content in zip(groups, contents, strict=True):
            group.clear()
            group.update(content)
        raise

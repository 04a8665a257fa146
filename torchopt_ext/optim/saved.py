"""State dicts of the fused optimizers: what is checked, converted and kept."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext.optim.local import local_tensor
from torchopt_ext.optim.state import (
    MOMENTS,
    check_loaded_master,
    check_loaded_moment,
    check_loaded_step,
    named_group_params,
)
from torchopt_ext.optim.storage import MASTER, REMAINDER, Storage

CONTROL_KEY = "torchopt_ext.control"
"""Top-level key of the control block's fields, kept where a loss scale or schedule uses them."""


def check_saved(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError unless the state dict's entries fit the optimizer's parameters."""
    check_control(state_dict.get(CONTROL_KEY, {}))
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = list(named_group_params(optimizer))
    if len(ids) != len(params):
        return  # torch's own message says which group differs
    for index, (_, _, name, param) in zip(ids, params, strict=True):
        entry = state_dict["state"].get(index)
        if not entry:
            continue
        what = f"parameter {index}" + (f" ({name!r})" if name else "")
        if missing := {"step", "exp_avg", "exp_avg_sq"} - entry.keys():
            raise ValueError(f"the state of {what} lacks {', '.join(sorted(missing))}")
        check_loaded_step(entry["step"], f"step of {what}")
        for moment in MOMENTS:
            if moment in entry:
                check_loaded_moment(entry[moment], param, f"{moment} of {what}")
        for master, dtype in ((MASTER, torch.float32), (REMAINDER, torch.int16)):
            if master in entry:
                check_loaded_master(entry[master], param, f"{master} of {what}", dtype)


def check_control(control: Any) -> None:
    """Raises ValueError unless ``control`` maps names to numbers."""
    if not isinstance(control, Mapping):
        raise ValueError(f"'{CONTROL_KEY}' is {control!r}, expected a dict of numbers")
    for name, value in control.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            raise ValueError(f"'{CONTROL_KEY}' has {name} = {value!r}, expected a number from 0 on")


def loaded_state(
    state_dict: Mapping[str, Any], groups: list[dict[str, Any]], storage: Storage
) -> dict[Any, dict[str, Any]]:
    """The state of a checked state dict, by parameter, as ``storage`` keeps it."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in groups for param in group["params"]]
    by_id = dict(zip(ids, params, strict=True))
    return {
        by_id.get(key, key): {
            name: fitted(by_id[key], name, value, storage) if key in by_id else value
            for name, value in entry.items()
        }
        for key, entry in state_dict["state"].items()
    }


def fitted(param: Tensor, name: str, value: Any, storage: Storage) -> Any:
    """A loaded state entry in memory of its own, on the parameter's device.

    torch casts every floating-point entry to the parameter's dtype, float32 moments of a bfloat16
    parameter included. Here moments have the dtype the optimizer keeps them in, and masters theirs.
    """
    if not isinstance(value, Tensor):
        return value
    device = local_tensor(param).device
    if name in (MASTER, REMAINDER):
        return value.detach().to(device, copy=True)
    if name in MOMENTS:
        return value.detach().to(device, storage.moment_dtype(param), copy=True)
    if name == "step":
        return value.detach().to(device, torch.float32, copy=True).reshape(())
    dtype = param.dtype if value.is_floating_point() else value.dtype
    return value.detach().to(device, dtype, copy=True)

"""Where the counts and the loss scale of a control block travel in a state dict.

torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` drop top-level keys, and fail
on a key of a parameter group that the dict lacks. So the fields are a dict in the state of the
first parameter, which those functions keep, and which torch's optimizers load and ignore.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CONTROL_KEY = "torchopt_ext.control"
"""Entry of the first parameter's state; containers have ``torchopt_ext.control.{field}`` keys."""


def as_entry(fields: Mapping[str, float]) -> dict[str, Tensor]:
    """The fields as an entry of a state: dcp.load does not load numbers at integer keys."""
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in fields.items()}


def of_entry(value: Any) -> Any:
    """The fields of an entry as numbers; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    single = {k for k, v in value.items() if isinstance(v, Tensor) and v.numel() == 1}
    return {k: v.item() if k in single else v for k, v in value.items()}


def of_flat(state_dict: Mapping[str, Any]) -> Any:
    """The fields in a flat dict: a container's own keys, or what torch's functions made of ours."""
    split = ((key.rpartition(f"{CONTROL_KEY}."), value) for key, value in state_dict.items())
    return of_entry({field: value for (_, found, field), value in split if found})


def problem(fields: Any) -> str | None:
    """What is wrong with loaded fields."""
    if not isinstance(fields, Mapping):
        return f"'{CONTROL_KEY}' is {fields!r}, expected a dict of numbers"
    for name, value in fields.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            return f"'{CONTROL_KEY}' has {name} = {value!r}, expected a number from 0 on"
    return None

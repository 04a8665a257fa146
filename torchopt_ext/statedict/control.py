"""Where the counts and the loss scale of a control block travel in a state dict.

torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` drop top-level keys, and fail
on a key of a parameter group that the dict lacks. So the fields are a dict in the state of the
first parameter, which those functions keep, and which torch's optimizers load and ignore.
"""

from collections.abc import Mapping
from typing import Any

CONTROL_KEY = "torchopt_ext.control"
"""Entry of the first parameter's state; containers have ``torchopt_ext.control.{field}`` keys."""


def problem(control: Any) -> str | None:
    """What is wrong with loaded fields."""
    if not isinstance(control, Mapping):
        return f"'{CONTROL_KEY}' is {control!r}, expected a dict of numbers"
    for name, value in control.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            return f"'{CONTROL_KEY}' has {name} = {value!r}, expected a number from 0 on"
    return None


def of_flat(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in a flat dict: a container's own keys, or what torch's functions made of ours."""
    split = ((key.rpartition(f"{CONTROL_KEY}."), value) for key, value in state_dict.items())
    return {field: value for (_, found, field), value in split if found}

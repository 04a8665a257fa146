"""The loss scale: its limits, and a scale in a tensor of its own, outside a control block."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._arguments import expect_numbers

LARGEST_SCALE: float = torch.finfo(torch.float32).max
SMALLEST_SCALE: float = torch.finfo(torch.float32).smallest_normal
RULE = {
    "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000.0, "hysteresis": 1.0,
    "min_scale": 0.0, "max_scale": 0.0,
}  # fmt: skip
"""The default rule by which a loss scale follows overflows."""


def is_scale(value: float) -> bool:
    """Returns whether float32 holds ``value`` as a positive, normal and finite number."""
    return SMALLEST_SCALE <= value <= LARGEST_SCALE


def is_count(value: float, least: int) -> bool:
    """Returns whether a value is a whole number from ``least`` on, or infinity."""
    return value >= least and (value.is_integer() or value == math.inf)


def scale_settings(**arguments: float | None) -> dict[str, float]:
    """Returns the control block's fields for arguments of :class:`torchopt_ext.GradScaler`.

    Raises:
        TypeError: an argument does not exist, or its value is not a number.
        ValueError: an argument is out of range.
    """
    if unknown := arguments.keys() - RULE.keys():
        raise TypeError(f"loss scaling has no argument {min(unknown)!r}")
    unlimited = {name: 0.0 for name in ("min_scale", "max_scale") if arguments.get(name) is None}
    values = RULE | arguments | unlimited
    expect_numbers(**values)
    rule = {name: float(value or 0.0) for name, value in values.items()}
    low, high = rule["min_scale"], rule["max_scale"]
    limit = min(high or LARGEST_SCALE, LARGEST_SCALE)
    valid = {
        "growth_factor": (1.0 <= rule["growth_factor"] <= LARGEST_SCALE, "1 or more"),
        "backoff_factor": (0.0 < rule["backoff_factor"] <= 1.0, "above 0, up to 1"),
        "growth_interval": (is_count(rule["growth_interval"], 1), "a whole number, 1 or more"),
        "hysteresis": (is_count(rule["hysteresis"], 0), "a whole number, 0 or more"),
        "max_scale": (high >= 0.0, "0 or more"),
        "min_scale": (0.0 <= low <= limit, f"0 to {limit:g}, the largest scale"),
    }
    for name, (fits, expected) in valid.items():
        if not fits:
            raise ValueError(f"Invalid {name}: {rule[name]:g}, expected {expected}")
    return rule


def expect_scale(name: str, scale: float, settings: Mapping[str, float]) -> None:
    """Rejects an initial scale that fails :func:`is_scale` or is outside the settings' limits."""
    expect_numbers(**{name: scale})
    low = max(settings["min_scale"], SMALLEST_SCALE)
    high = min(settings["max_scale"] or LARGEST_SCALE, LARGEST_SCALE)
    if not low <= scale <= high:
        raise ValueError(f"Invalid {name}: {scale:g}, expected {low:g} to {high:g}")


class LossScale:
    """A scale that follows overflows by the rule of docs/numerics.md section 4.

    Args:
        scale: float32, one element; :meth:`update` changes it in place.
        settings: from :func:`scale_settings`.
        growth_tracker, hysteresis_tracker: initial counts.
    """

    def __init__(
        self,
        scale: Tensor,
        settings: Mapping[str, float],
        growth_tracker: float = 0.0,
        hysteresis_tracker: float = 0.0,
    ) -> None:
        self.scale = scale
        with torch.inference_mode(False):
            self._block = ops.new_control(
                scale.device,
                growth_tracker=growth_tracker,
                hysteresis_tracker=hysteresis_tracker,
                **settings,
            )

    def field(self, name: str) -> Tensor:
        """Returns a view of a field: ``growth_tracker`` counts steps without overflow in a row, and
        ``hysteresis_tracker`` the overflows that count against the hysteresis."""
        return self._block[ops.CONTROL_FIELDS.index(name)]

    def update(self, found_inf: Tensor) -> None:
        """Counts a step and lets the scale back off or grow.

        Args:
            found_inf: one float32 or float64 element on the scale's device, nonzero for overflow.
        """
        ops.loss_scale_update_(self._block, found_inf, self.scale)

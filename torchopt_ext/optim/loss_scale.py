"""The loss scale: its limits, and one that lives in a tensor of its own beside a control block."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C, ops

LARGEST_SCALE: float = torch.finfo(torch.float32).max
SMALLEST_SCALE: float = torch.finfo(torch.float32).smallest_normal


def is_scale(value: float) -> bool:
    """Whether float32 holds ``value`` as a positive, normal and finite number."""
    return SMALLEST_SCALE <= value <= LARGEST_SCALE


def scale_settings(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: float = 2000,
    hysteresis: float = 1,
    consecutive_hysteresis: bool = False,
    min_scale: float | None = 0.0,
    max_scale: float | None = 0.0,
) -> dict[str, float]:
    """The fields of a control block for the arguments of :class:`torchopt_ext.GradScaler`.

    Raises:
        ValueError: an argument out of range.
    """
    low, high = float(min_scale or 0.0), float(max_scale or 0.0)
    if not 1.0 <= growth_factor <= LARGEST_SCALE or not 0.0 < backoff_factor <= 1.0:
        raise ValueError(f"Invalid factors: {growth_factor=}, {backoff_factor=}")
    if not growth_interval >= 1 or not hysteresis >= 0:
        raise ValueError(f"Invalid counts: {growth_interval=}, {hysteresis=}")
    if not 0.0 <= low <= LARGEST_SCALE or not high >= 0.0 or 0.0 < high < low:
        raise ValueError(f"Invalid limits: {min_scale=}, {max_scale=}")
    return {
        "growth_factor": float(growth_factor),
        "backoff_factor": float(backoff_factor),
        "growth_interval": float(growth_interval),
        "hysteresis": float(hysteresis),
        "consecutive_hysteresis": float(consecutive_hysteresis),
        "min_scale": low,
        "max_scale": high,
    }


class LossScale:
    """A scale that follows overflows by the rule of docs/numerics.md section 4.

    Args:
        scale: float32, one element; :meth:`update` changes it in place.
        settings: from :func:`scale_settings`.
        growth_tracker, hysteresis_tracker: counts to go on from.
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
        """A view of the control block: ``growth_tracker`` counts steps without overflow in a row,
        ``hysteresis_tracker`` the overflows that count against the hysteresis."""
        return self._block[ops.CONTROL_FIELDS.index(name)]

    def update(self, found_inf: Tensor) -> None:
        """Counts a step, and lets the scale back off or grow.

        Args:
            found_inf: one float32 or float64 on the scale's device, nonzero for an overflow.
        """
        # Without the dispatcher where nobody would see the operator there.
        unseen = type(self._block) is Tensor and not (
            torch.compiler.is_compiling() or _C.observed()
        )
        update: Any = _C if unseen else ops
        update.loss_scale_update_(self._block, found_inf, self.scale)

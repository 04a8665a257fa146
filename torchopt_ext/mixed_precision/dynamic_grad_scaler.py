"""DynamicGradScaler: a loss scale that follows overflows, with InternEvo's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext.optim.control import read_fields, write_fields

_STATE_KEYS = {"_growth_step": "growth_tracker", "_hysteresis_step": "hysteresis_tracker"}


class DynamicGradScaler:
    """A loss scale on the device that backs off after overflows and grows after good steps.

    Overflows are counted until the scale next grows; from the ``hysteresis``-th on, each backs the
    scale off (InternEvo, Megatron-LM, DeepSpeed; docs/numerics.md section 4).

    Args:
        initial_scale: the scale at first.
        growth_factor: multiplies the scale after ``growth_interval`` good steps.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: good steps in a row until the scale grows.
        min_scale, max_scale: limits; None or 0 for none.
        hysteresis: overflows until the scale backs off; 0 and 1: at the first.
        dtype: of the gradients; float16 needs a scale that moves.
        consecutive_hysteresis: every good step forgives overflows (apex, and DeepSpeed's option).
        device: of the scale.

    Raises:
        AssertionError: float16 with a growth factor of at most 1 or a backoff factor not between
            0 and 1.
        ValueError: another argument is out of range.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        *,
        consecutive_hysteresis: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if dtype == torch.float16:
            assert growth_factor > 1.0, f"growth_factor is {growth_factor}, expected above 1"
            assert 0.0 < backoff_factor < 1.0, (
                f"backoff_factor is {backoff_factor}, expected between 0 and 1"
            )
        if not is_scale(initial_scale):
            raise ValueError(f"Invalid initial_scale: {initial_scale}")
        if not growth_factor >= 1.0 or not 0.0 < backoff_factor <= 1.0:
            raise ValueError(f"Invalid factors: {growth_factor=}, {backoff_factor=}")
        if not growth_interval >= 1 or not hysteresis >= 0:
            raise ValueError(f"Invalid counts: {growth_interval=}, {hysteresis=}")
        low, high = min_scale or 0.0, max_scale or 0.0
        if not low >= 0.0 or not high >= 0.0 or 0.0 < high < low:
            raise ValueError(f"Invalid limits: {min_scale=}, {max_scale=}")
        self._settings = {
            "growth_factor": float(growth_factor),
            "backoff_factor": float(backoff_factor),
            "growth_interval": float(growth_interval),
            "hysteresis": float(hysteresis),
            "consecutive_hysteresis": float(consecutive_hysteresis),
            "min_scale": float(low),
            "max_scale": float(high),
        }
        device = torch.device("cpu" if device is None else device)
        with torch.inference_mode(False):
            self._scale = torch.tensor([initial_scale], dtype=torch.float32, device=device)
            self._block = ops.new_control(device, **self._settings)  # type: ignore[arg-type]
        self._constant: float | None = None  # the scale, if it was read

    @property
    def scale(self) -> Tensor:
        """float32, one element; :meth:`update` changes it in place."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale, rounded once to float32."""
        return self._scale.double().reciprocal().float()

    def is_one(self) -> bool:
        """Whether the scale is 1; waits for its device only if :meth:`update` can change it."""
        moves = self._settings["growth_factor"] != 1.0 or self._settings["backoff_factor"] != 1.0
        if moves or self._constant is None:
            self._constant = self._scale.item()
        return self._constant == 1.0

    @torch.no_grad()
    def update(self, overflow: bool | Tensor) -> None:
        """Counts a step, and lets the scale back off or grow.

        Args:
            overflow: whether a gradient was not finite: a bool, or one element, float32 or float64
                on the scale's device, nonzero for yes, which is not waited for.
        """
        if not isinstance(overflow, Tensor):
            overflow = torch.tensor(float(overflow), dtype=torch.float64, device=self._scale.device)
        elif overflow.dtype not in (torch.float32, torch.float64):
            overflow = overflow.double()
        ops.loss_scale_update_(self._block, overflow, self._scale)

    def state_dict(self) -> dict[str, Any]:
        """``_scale``, ``_growth_step`` and ``_hysteresis_step`` as numbers; no settings."""
        fields = read_fields(self._block)
        counts = {key: int(fields[name]) for key, name in _STATE_KEYS.items()}
        return {"_scale": self._scale.item(), **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave.

        Raises:
            ValueError: a number is missing or out of range. Nothing is changed.
        """
        self.check_state_dict(state_dict)
        self._scale.fill_(float(state_dict["_scale"]))
        self._constant = None
        counts = {name: float(state_dict[key]) for key, name in _STATE_KEYS.items()}
        write_fields(self._block, counts)

    @staticmethod
    def check_state_dict(state_dict: Any) -> None:
        """Raises ValueError unless it is what :meth:`load_state_dict` takes."""
        expected = {"_scale", *_STATE_KEYS}
        if not isinstance(state_dict, Mapping) or not expected <= state_dict.keys():
            raise ValueError(
                f"a scaler's state has {', '.join(sorted(expected))}; got {state_dict!r}"
            )
        if not is_scale(float(state_dict["_scale"])):
            raise ValueError(f"'_scale' is {state_dict['_scale']!r}, expected a positive number")
        for key in _STATE_KEYS:
            if not 0 <= float(state_dict[key]) < 2**53:
                raise ValueError(f"{key!r} is {state_dict[key]!r}, expected a count")


def is_scale(value: float) -> bool:
    """Whether float32 has something positive and finite for ``value``."""
    numbers = torch.finfo(torch.float32)
    return numbers.smallest_normal <= value <= numbers.max

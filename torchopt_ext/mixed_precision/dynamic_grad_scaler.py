"""DynamicGradScaler: a loss scale that follows overflows, with InternEvo's interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim.loss_scale import LossScale, expect_scale, is_scale, scale_settings
from torchopt_ext.optim.options import answers_other_names

_COUNTS = {"_growth_step": "growth_tracker", "_hysteresis_step": "hysteresis_tracker"}
"""The control block's field of each count in a state dict."""


class DynamicGradScaler(LossScale):
    """A loss scale on the device that backs off after overflows and grows after good steps.

    Overflows are counted until the scale next grows. From the ``hysteresis``-th overflow on, each
    backs the scale off (InternEvo, Megatron-LM, DeepSpeed; docs/numerics.md section 4).

    Args:
        initial_scale: the scale at the start.
        growth_factor: multiplies the scale after ``growth_interval`` good steps.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: good steps in a row until the scale grows.
        min_scale, max_scale: limits of the scale; None or 0 for no limit.
        hysteresis: overflows until the scale backs off; with 0 or 1 the first overflow does it.
        dtype: the gradients' dtype; float16 needs a scale that can change.
        device: the scale's device.

    Raises:
        AssertionError: ``dtype`` is float16, and ``growth_factor`` is at most 1 or
            ``backoff_factor`` is not between 0 and 1.
        TypeError: an argument is not a number.
        ValueError: another argument is out of range.
    """

    @answers_other_names()
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
        device: torch.device | str | None = None,
    ) -> None:
        if dtype == torch.float16:
            assert growth_factor > 1.0, f"growth_factor is {growth_factor}, expected above 1"
            assert 0.0 < backoff_factor < 1.0, (
                f"backoff_factor is {backoff_factor}, expected between 0 and 1"
            )
        self._moves = growth_factor != 1.0 or backoff_factor != 1.0
        settings = scale_settings(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        expect_scale("initial_scale", initial_scale, settings)
        with torch.inference_mode(False):
            scale = torch.tensor([initial_scale], dtype=torch.float32, device=device)
        super().__init__(scale, settings)
        self._fixed = float(initial_scale)  # the scale, while it cannot move

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale, rounded once to float32."""
        return self.scale.double().reciprocal().float()

    def is_one(self) -> bool:
        """Returns whether the scale is 1. Waits for the device only if the scale can move."""
        return (self.scale.item() if self._moves else self._fixed) == 1.0

    @torch.no_grad()
    def update(self, overflow: bool | Tensor) -> None:
        """Counts a step, and backs the scale off or grows it.

        Args:
            overflow: whether a gradient was not finite: a bool, or a tensor of one element on the
                scale's device, nonzero for yes. The host does not wait for it.
        """
        flag = torch.as_tensor(overflow, device=self.scale.device)
        super().update(flag if flag.dtype == torch.float32 else flag.double())

    def state_dict(self) -> dict[str, Any]:
        """Returns ``_scale``, ``_growth_step``, ``_hysteresis_step`` as numbers; no settings."""
        counts = {key: int(self.field(name).item()) for key, name in _COUNTS.items()}
        return {"_scale": self.scale.item()} | counts

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of :meth:`state_dict`.

        Raises:
            ValueError: a number is missing or out of range. Nothing is changed.
        """
        self._check_state_dict(state_dict)
        self._fixed = float(state_dict["_scale"])
        self.scale.fill_(self._fixed)
        for key, name in _COUNTS.items():
            self.field(name).fill_(float(state_dict[key]))

    def _check_state_dict(self, state_dict: Any) -> None:
        """Raises ValueError unless :meth:`load_state_dict` accepts the state dict."""
        held = state_dict if isinstance(state_dict, Mapping) else {}
        for key in ("_scale", *_COUNTS):
            value: Any = held.get(key)
            number = float(value) if hasattr(value, "__float__") else math.nan
            if not (is_scale(number) if key == "_scale" else 0 <= number < 2**53):
                expected = "a positive number" if key == "_scale" else "a count"
                raise ValueError(
                    f"{key} of a scaler's state is {value!r:.200}, expected {expected}"
                )

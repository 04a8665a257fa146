"""DynamicGradScaler: a loss scale that follows overflows, with InternEvo's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._arguments import expect_numbers
from torchopt_ext.optim.loss_scale import LossScale, expect_scale, is_scale, scale_settings


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
        expect_numbers(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
        )
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
        self._constant: float | None = None  # the scale as last read

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale, rounded once to float32."""
        return self.scale.double().reciprocal().float()

    def is_one(self) -> bool:
        """Returns whether the scale is 1. If the scale is constant, only the first call waits."""
        if self._moves or self._constant is None:
            self._constant = self.scale.item()
        return self._constant == 1.0

    @torch.no_grad()
    def update(self, overflow: bool | Tensor) -> None:
        """Counts a step, and backs the scale off or grows it.

        Args:
            overflow: whether a gradient was not finite: a bool, or a tensor of one element, float32
                or float64 on the scale's device, nonzero for yes. The host does not wait for it.
        """
        if not isinstance(overflow, Tensor):
            overflow = torch.tensor(float(overflow), dtype=torch.float64, device=self.scale.device)
        elif overflow.dtype not in (torch.float32, torch.float64):
            overflow = overflow.double()
        super().update(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Returns ``_scale``, ``_growth_step``, ``_hysteresis_step`` as numbers; no settings."""
        counts = {key: int(count.item()) for key, count in self._counts().items()}
        return {"_scale": self.scale.item()} | counts

    def _counts(self) -> dict[str, Tensor]:
        names = {"_growth_step": "growth_tracker", "_hysteresis_step": "hysteresis_tracker"}
        return {key: self.field(name) for key, name in names.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of :meth:`state_dict`.

        Raises:
            ValueError: a number is missing or out of range. Nothing is changed.
        """
        self.check_state_dict(state_dict)
        self._constant = None
        for key, tensor in ({"_scale": self.scale} | self._counts()).items():
            tensor.fill_(float(state_dict[key]))

    def check_state_dict(self, state_dict: Any) -> None:
        """Raises ValueError unless :meth:`load_state_dict` accepts the state dict."""
        counts = self._counts()
        if not isinstance(state_dict, Mapping) or not {"_scale", *counts} <= state_dict.keys():
            raise ValueError(
                f"a scaler's state has _scale, {', '.join(counts)}; got {state_dict!r}"
            )
        numbers = {key: state_dict[key] for key in ("_scale", *counts)}
        try:
            expect_numbers(**numbers)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if not is_scale(float(state_dict["_scale"])):
            raise ValueError(f"'_scale' is {state_dict['_scale']!r}, expected a positive number")
        for key in counts:
            if not 0 <= float(state_dict[key]) < 2**53:
                raise ValueError(f"{key!r} is {state_dict[key]!r}, expected a count")

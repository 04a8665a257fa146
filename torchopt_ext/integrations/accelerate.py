"""Accelerate with clipping, overflow checks and unscaling in the optimizer's step.

Stock Accelerate unscales, measures and clips gradients before the step, and learns from its scaler
only whether one was skipped (accelerate/optimizer.py).
"""

import math
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from torchopt_ext.integrations.clipping import (
    clipping_optimizers,
    set_threshold,
    was_skipped,
)
from torchopt_ext.mixed_precision import GradScaler
from torchopt_ext.optim.control import ControlView


class FusedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """What :meth:`Accelerator.prepare` makes of an optimizer that clips in its step."""

    _own_threshold: float | None = None  # while that of clip_grad_norm_ is set
    _clip: float | None = None  # which that is
    _asked = False  # whether the next step is to clip by it
    _norm: Tensor | None = None  # what the next step fills

    def clip_next(self, max_norm: float) -> Tensor:
        """Lets the next step clip; returns a 0-dim tensor that the step fills with the norm."""
        if self._clip is None:
            self._own_threshold = self.max_grad_norm
        self._clip, self._asked = max_norm, True
        set_threshold(clipping_optimizers(self.optimizer), max_norm)
        if self._norm is None:
            self._norm = torch.full_like(self.control.live("grad_norm"), math.nan)
        return self._norm

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step, where gradients are complete."""
        if not self.gradient_state.sync_gradients:
            return super().step(closure)
        # Only now: setting it writes to the device, and most loops ask before each step.
        if self._clip is not None and not self._asked:
            if self.max_grad_norm == self._clip:  # nobody has set another
                self.max_grad_norm = self._own_threshold
            self._clip = None
        self._asked = False
        result = super().step(closure)
        if self._norm is not None:
            self._norm.copy_(self.control.grad_norm)  # NaN if the step measured none
            self._norm = None
        return result

    @property
    def control(self) -> ControlView:
        """The last step's decision, such as ``control.grad_norm``."""
        return self.optimizer.control

    @property
    def max_grad_norm(self) -> float | None:
        """The step's clip threshold, as :attr:`torchopt_ext.FusedAdamW.max_grad_norm`."""
        return clipping_optimizers(self.optimizer)[0].max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._clip = None
        for optimizer in clipping_optimizers(self.optimizer):
            optimizer.max_grad_norm = value

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, so that prepared schedules wait.

        Waits for a GPU if steps can be skipped, as the stock scaler's step does.
        """
        return was_skipped(clipping_optimizers(self.optimizer), self.scaler is not None)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator that leaves clipping to FusedAdam, FusedAdamW and ZeRO with them.

    Other optimizers are prepared and clipped as by accelerate.Accelerator.
    """

    scaler: torch.amp.GradScaler | None

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Also makes the scaler :class:`torchopt_ext.GradScaler`, which reads no gradient."""
        if not clipping_optimizers(optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if type(self.scaler) is torch.amp.GradScaler:
            stock = self.scaler
            self.scaler = GradScaler(
                self.device.type, stock.get_scale(), stock.get_growth_factor(),
                stock.get_backoff_factor(), stock.get_growth_interval(), stock.is_enabled(),
            )  # fmt: skip
            for earlier in self._optimizers:
                if earlier.scaler is stock:
                    earlier.scaler = self.scaler
        # State is made beside the parameters; moving it would be a state dict of all ranks.
        prepared = FusedAcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Sets the threshold of the next step, which clips all gradients of its optimizer.

        Returns:
            The norm, unscaled: a 0-dim tensor that is NaN until the step fills it. Stock
            Accelerate's has it before the step.

        Raises:
            ValueError: a norm other than the 2-norm, or optimizers of which some do not clip.
        """
        prepared = [o for o in self._optimizers if isinstance(o, FusedAcceleratedOptimizer)]
        if not prepared:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2 or len(self._optimizers) > 1:
            raise ValueError(
                f"the step clips by the 2-norm of one optimizer's gradients; got norm_type="
                f"{norm_type} and {len(self._optimizers)} optimizers: set max_grad_norm of each"
            )
        return prepared[0].clip_next(max_norm)

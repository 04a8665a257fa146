"""Accelerate with clipping, overflow checks and unscaling in the optimizer's step.

Stock Accelerate unscales, measures and clips gradients before the step. It knows of skipped steps
only from its scaler (accelerate/optimizer.py).
"""

import math
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from torchopt_ext.integrations.clipping import clipping_optimizers, set_threshold, was_skipped
from torchopt_ext.mixed_precision import GradScaler
from torchopt_ext.optim.control import ControlView

__all__ = ["Accelerator", "FusedAcceleratedOptimizer"]


class FusedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The wrapper in which :meth:`Accelerator.prepare` puts an optimizer that clips in its step."""

    _own_threshold: float | None = None  # kept while clip_grad_norm_'s is set
    _clip: float | None = None  # clip_grad_norm_'s threshold
    _asked = False  # whether clip_grad_norm_ was called for the next step
    _norm: Tensor | None = None  # the tensor that the next step fills

    def _clip_next(self, max_norm: float) -> Tensor:
        """Makes the next step clip. Returns a 0-dim tensor that the step fills with the norm."""
        if self._clip is None:
            self._own_threshold = self.max_grad_norm
        self.max_grad_norm = max_norm
        self._clip, self._asked = max_norm, True
        if self._norm is None:
            self._norm = torch.full_like(self.control.live("grad_norm"), math.nan)
        return self._norm

    def step(self, closure: Any = None) -> Any:
        """Makes the optimizer's step if gradients are complete."""
        if not self.gradient_state.sync_gradients:
            return super().step(closure)
        # Reset only now: setting it writes to the device, and most loops set it for each step.
        if self._clip is not None and not self._asked:
            if (self.max_grad_norm or 0.0) == self._clip:  # nobody has set another threshold
                self.max_grad_norm = self._own_threshold
            self._clip = None
        self._asked = False
        result = super().step(closure)
        if self._norm is not None:
            self._norm.copy_(self.control.grad_norm)  # NaN if the step measured no norm
            self._norm = None
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears complete gradients, and drops the request of `clip_grad_norm_` for them."""
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self._asked, self._norm = False, None

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
        set_threshold(self.optimizer, value)
        self._clip = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, so that prepared schedules wait.

        Reading it waits for a GPU if steps can be skipped, as the stock scaler's step does.
        """
        return was_skipped(clipping_optimizers(self.optimizer), self.scaler is not None)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator whose clipping happens in the step of fused optimizers and ZeRO.

    Other optimizers are prepared and clipped as by accelerate.Accelerator.
    """

    scaler: torch.amp.GradScaler | None

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepares an optimizer, with :class:`torchopt_ext.GradScaler`, which reads no gradient."""
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
        # State is made on the parameters' device. Moving it would need all ranks' state dict.
        prepared = FusedAcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Sets the threshold of the next step, which clips all gradients of its optimizer.

        Returns:
            The unscaled norm: a 0-dim tensor that is NaN until the step fills it. Stock
            Accelerate's tensor has the norm before the step.

        Raises:
            ValueError: The norm is not the 2-norm, or there is more than one optimizer.
        """
        prepared = [o for o in self._optimizers if isinstance(o, FusedAcceleratedOptimizer)]
        if not prepared:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2 or len(self._optimizers) > 1:
            raise ValueError(
                f"the step clips by the 2-norm of one optimizer's gradients; got norm_type="
                f"{norm_type} and {len(self._optimizers)} optimizers: set max_grad_norm of each"
            )
        return prepared[0]._clip_next(max_norm)

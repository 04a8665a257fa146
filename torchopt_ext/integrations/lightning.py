"""Lightning with clipping by ``gradient_clip_val`` in the optimizer's step, in every precision.

Stock Lightning refuses to clip with fused optimizers under "16-mixed" and "bf16-mixed"
(lightning/pytorch/plugins/precision/amp.py).
"""

import math
from typing import Any

from torchopt_ext.integrations.clipping import (
    clipping_optimizers,
    expect_first,
    set_threshold,
    was_skipped,
)

__all__ = ["FusedStep"]


class FusedStep:
    """Clips in the optimizer's step: ``class Model(FusedStep, lightning.LightningModule)``.

    ``Trainer(gradient_clip_val=...)`` becomes the step's threshold. 0 only measures the norm; if
    it is not set, the optimizer's own ``max_grad_norm`` stays. Schedules of interval "step" wait if
    a step was skipped. ``trainer.optimizers[0].control`` is the last step's decision. For other
    packages' optimizers nothing changes.
    """

    trainer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        expect_first(FusedStep, cls, "configure_gradient_clipping")

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Sets the step's threshold.

        Raises:
            ValueError: ``gradient_clip_algorithm`` is "value".
        """
        if not clipping_optimizers(optimizer):
            super().configure_gradient_clipping(  # type: ignore[misc]
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
            return
        if gradient_clip_val is None:
            return
        if gradient_clip_algorithm == "value":
            raise ValueError(
                f'{type(optimizer).__name__} clips by the norm; got gradient_clip_algorithm="value"'
            )
        set_threshold(optimizer, float(gradient_clip_val) or math.inf)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Steps the schedule, unless it counts steps and the optimizer's last step was skipped."""
        configs = self.trainer.lr_scheduler_configs
        by_step = any(c.scheduler is scheduler and c.interval == "step" for c in configs)
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if not (by_step and was_skipped(clipping_optimizers(scheduler.optimizer), scaled)):
            super().lr_scheduler_step(scheduler, metric)  # type: ignore[misc]

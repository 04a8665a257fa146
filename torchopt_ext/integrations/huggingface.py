"""transformers' Trainer with clipping by ``max_grad_norm`` in the optimizer's step."""

from typing import Any

import accelerate

from torchopt_ext.integrations.accelerate import Accelerator, FusedAcceleratedOptimizer
from torchopt_ext.integrations.clipping import expect_first

__all__ = ["FusedStep"]


class FusedStep:
    """Clips in the optimizer's step: ``class Trainer(FusedStep, transformers.Trainer)``.

    ``args.max_grad_norm`` becomes the step's threshold. 0 only measures the norm, for which the
    stock Trainer reads all gradients once more. The logged ``grad_norm`` is the step's norm.
    Learning-rate schedules wait if a step was skipped. ``trainer.optimizer.control`` is the last
    step's decision. ``load_best_model_at_end`` also resets remainders. For other packages'
    optimizers nothing changes.
    """

    accelerator: accelerate.Accelerator
    optimizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        expect_first(FusedStep, cls, "create_accelerator_and_postprocess")

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The Trainer makes its own Accelerator, with which nothing has been prepared yet.
        if type(self.accelerator) is not accelerate.Accelerator:
            raise TypeError(
                f"FusedStep changes the Accelerator of transformers.Trainer, and found a "
                f"{type(self.accelerator).__name__}: let that be a subclass of {Accelerator}"
            )
        self.accelerator.__class__ = Accelerator

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        # For gradients on several meshes, as with FSDP and tensor parallelism, the Trainer clips
        # without the Accelerator. The step sums each gradient over its own mesh.
        if isinstance(self.optimizer, FusedAcceleratedOptimizer):
            return False
        return bool(super()._has_mixed_mesh_grads(model))  # type: ignore[misc]

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        # It loads weights alone, to which the last step's remainders do not belong.
        if isinstance(self.optimizer, FusedAcceleratedOptimizer):
            self.optimizer.optimizer.refresh_masters()

"""torchtitan 0.3 with torchft: its FaultTolerantTrainer builds torchopt_ext's optimizers.

    def my_llama3() -> FaultTolerantTrainer.Config:
        return use_torchopt_ext(llama3_torchft_debugmodel())

This Trainer ignores `--override.imports` (torchtitan 0.3.0, experiments/torchft/trainer.py).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torchtitan.experiments.torchft import optimizer as stock

from torchopt_ext.containers.fault_tolerant import FaultTolerant
from torchopt_ext.containers.optimizers import check_compat
from torchopt_ext.integrations import torchtitan_0_3

__all__ = ["FTOptimizersContainer", "use_torchopt_ext"]


class FTOptimizersContainer(FaultTolerant[Any], torchtitan_0_3.OptimizersContainer):
    """:class:`torchtitan_0_3.OptimizersContainer` for replica groups that may fail and come back.

    It replaces torchtitan's TorchFTOptimizersContainer (experiments/torchft/optimizer.py).

    Args:
        config: the container's configuration.
        model_parts: the modules to train.
        ft_manager: torchtitan's TorchFTManager.

    Raises:
        ValueError: `fault_tolerance.enable` is false, or the base class raises it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(
        torchtitan_0_3.OptimizersContainer.Config,
        stock.TorchFTOptimizersContainer.Config,  # type: ignore[misc]
    ):
        """Derives from torchtitan's class, so that the Trainer passes its manager."""

        compat: Literal["torchtitan"] | None = None
        """Use "torchtitan" to count the step that makes the state, as torchtitan does."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], ft_manager: Any) -> None:
        if not ft_manager.enabled:
            raise ValueError(
                "fault_tolerance.enable is false, but the optimizer section is of a container for "
                "fault tolerance: enable it, or use torchtitan_0_3.OptimizersContainer.Config"
            )
        self.compat = check_compat(config.compat)
        super().__init__(config, model_parts=model_parts)
        self._init_fault_tolerance(ft_manager.manager, ft_manager.use_async_quorum)


def use_torchopt_ext(config: Any, **fields: Any) -> Any:
    """Puts torchopt_ext's optimizers and schedules into a FaultTolerantTrainer.Config.

    Args:
        config: the FaultTolerantTrainer.Config; changed in place and returned.
        fields: fields of :class:`FTOptimizersContainer.Config`.

    Raises:
        TypeError: The optimizer or scheduler section belongs to another class of containers.
        ValueError: as :func:`torchtitan_0_3.use_torchopt_ext`.
    """
    theirs = stock.TorchFTOptimizersContainer
    return torchtitan_0_3.put_into(config, FTOptimizersContainer, theirs, fields)

"""One object for all optimizers, and one for all learning-rate schedules, of a training job."""

from torchopt_ext.containers.build import build_optimizers
from torchopt_ext.containers.fault_tolerant import FTOptimizersContainer
from torchopt_ext.containers.in_backward import OptimizersInBackwardContainer
from torchopt_ext.containers.lr_schedulers import LRSchedulersContainer, build_lr_schedulers
from torchopt_ext.containers.optimizers import OptimizersContainer

__all__ = [
    "FTOptimizersContainer",
    "LRSchedulersContainer",
    "OptimizersContainer",
    "OptimizersInBackwardContainer",
    "build_lr_schedulers",
    "build_optimizers",
]

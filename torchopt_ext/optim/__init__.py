"""The fused optimizers and the step they share."""

from torchopt_ext.optim.fused_adam import FusedAdam, FusedAdamW
from torchopt_ext.optim.fused_lion import FusedLion
from torchopt_ext.optim.fused_muon import FusedMuon
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.fused_sgd import FusedSGD
from torchopt_ext.optim.step import fused_step

__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "FusedOptimizer",
    "FusedSGD",
    "fused_step",
]

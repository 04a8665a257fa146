"""FusedAdam, FusedAdamW and the step they share."""

from torchopt_ext.optim.fused_adam import FusedAdam, FusedAdamW
from torchopt_ext.optim.step import fused_step

__all__ = ["FusedAdam", "FusedAdamW", "fused_step"]

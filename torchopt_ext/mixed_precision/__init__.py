"""Loss scaling."""

from torchopt_ext.mixed_precision.grad_scaler import GradScaler

__all__ = ["GradScaler"]

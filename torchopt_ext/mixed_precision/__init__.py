"""Loss scaling, master weights around any optimizer, and offloading."""

from torchopt_ext.mixed_precision.base_optimizer import BaseOptimizer
from torchopt_ext.mixed_precision.checkpoint import load_checkpoint, save_checkpoint
from torchopt_ext.mixed_precision.dynamic_grad_scaler import DynamicGradScaler
from torchopt_ext.mixed_precision.fsdp_optimizer import FSDPadaptOptimizer
from torchopt_ext.mixed_precision.grad_scaler import GradScaler
from torchopt_ext.mixed_precision.offload import (
    load_fsdp_optimizer,
    offload_fsdp_optimizer,
    optimizer_on_device,
)

__all__ = [
    "BaseOptimizer",
    "DynamicGradScaler",
    "FSDPadaptOptimizer",
    "GradScaler",
    "load_checkpoint",
    "load_fsdp_optimizer",
    "offload_fsdp_optimizer",
    "optimizer_on_device",
    "save_checkpoint",
]

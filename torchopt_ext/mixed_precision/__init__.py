"""Loss scaling, master weights around any optimizer, and offloading."""

import importlib
from typing import TYPE_CHECKING, Any

from torchopt_ext.mixed_precision.base_optimizer import BaseOptimizer
from torchopt_ext.mixed_precision.dynamic_grad_scaler import DynamicGradScaler
from torchopt_ext.mixed_precision.fsdp_optimizer import FSDPadaptOptimizer
from torchopt_ext.mixed_precision.grad_scaler import GradScaler
from torchopt_ext.mixed_precision.offload import (
    load_fsdp_optimizer,
    offload_fsdp_optimizer,
    optimizer_on_device,
)

if TYPE_CHECKING:
    from torchopt_ext.mixed_precision.checkpoint import load_checkpoint, save_checkpoint

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


def __getattr__(name: str) -> Any:
    """Imports the checkpoint functions when used: torch.distributed.checkpoint takes 0.5 s."""
    if name in ("load_checkpoint", "save_checkpoint"):
        return getattr(importlib.import_module(f"{__name__}.checkpoint"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

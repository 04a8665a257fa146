"""The optimizer half of a PyTorch training step, in C++ and CUDA.

FusedAdam and FusedAdamW stand where torch.optim's do, GradScaler where torch.amp's does,
ZeroRedundancyOptimizer where torch.distributed.optim's does, FSDPadaptOptimizer where LightRFT's
does, the containers where torchtitan's do, and ``torchopt_ext.ops`` holds the operators they are
made of. docs/numerics.md states what is computed.
"""

__version__ = "0.2.0"

import importlib
from typing import TYPE_CHECKING, Any

from torchopt_ext import _library, ops  # _library first: it checks what it loads
from torchopt_ext.optim import FusedAdam, FusedAdamW

if TYPE_CHECKING:
    from torchopt_ext import containers, mixed_precision, zero
    from torchopt_ext.mixed_precision import (
        DynamicGradScaler,
        FSDPadaptOptimizer,
        GradScaler,
        load_fsdp_optimizer,
        offload_fsdp_optimizer,
        optimizer_on_device,
    )
    from torchopt_ext.optim.ddp import norm_hook
    from torchopt_ext.optim.groups import param_groups
    from torchopt_ext.optim.step_log import log_to
    from torchopt_ext.zero import ZeroRedundancyOptimizer

cuda_built = _library.cuda_built
cmake_prefix_path: str = _library.cmake_prefix_path
"""Where CMake finds the C++ interface (docs/cpp.md), as torch.utils.cmake_prefix_path for torch."""

__all__ = [
    "DynamicGradScaler", "FSDPadaptOptimizer", "FusedAdam", "FusedAdamW", "GradScaler",
    "ZeroRedundancyOptimizer", "cmake_prefix_path", "containers", "cuda_built",
    "load_fsdp_optimizer", "log_to", "mixed_precision", "norm_hook", "offload_fsdp_optimizer",
    "ops", "optimizer_on_device", "param_groups", "zero",
]  # fmt: skip

_MODULES = {
    "ZeroRedundancyOptimizer": "zero",
    "log_to": "optim.step_log",
    "norm_hook": "optim.ddp",
    "param_groups": "optim.groups",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a subpackage when it, or a name of it, is first used: some take long to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("containers", "mixed_precision", "zero"):
        return importlib.import_module(f"{__name__}.{name}")
    package = _MODULES.get(name, "mixed_precision")
    return getattr(importlib.import_module(f"{__name__}.{package}"), name)

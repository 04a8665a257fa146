"""The optimizer half of a PyTorch training step, in C++ and CUDA.

FusedAdam, FusedAdamW and FusedSGD take the place of torch.optim's classes, FusedLion is Lion, and
FusedOptimizer has groups of any of them. GradScaler takes the place of torch.amp's,
ZeroRedundancyOptimizer of torch.distributed.optim's, FSDPadaptOptimizer of LightRFT's, and the
containers of torchtitan's. ``torchopt_ext.ops`` holds the operators that they call.
docs/numerics.md specifies what the operators compute.
"""

__version__ = "0.2.0"

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _is_command() -> bool:
    """Returns whether Python starts the command line: its --help does not wait for torch."""
    first, *rest = getattr(sys, "argv", None) or [""]
    if first == "-m":  # until Python has found the module's file
        return sys.orig_argv[-1 - len(rest)] == "torchopt_ext"
    return Path(first).name == "torchopt-ext" and first in sys.orig_argv  # not in its workers


if TYPE_CHECKING or not _is_command():
    from torchopt_ext import _library, ops  # noqa: F401 (_library first checks the libraries)
    from torchopt_ext._library import cmake_prefix_path, cuda_built
    from torchopt_ext.optim import (
        FusedAdam,
        FusedAdamW,
        FusedLion,
        FusedMuon,
        FusedOptimizer,
        FusedSGD,
    )

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
    from torchopt_ext.optim.digest import digest
    from torchopt_ext.optim.groups import param_groups
    from torchopt_ext.optim.muon_groups import muon_groups
    from torchopt_ext.optim.orthogonalize import orthogonalize
    from torchopt_ext.optim.step_log import log_to
    from torchopt_ext.zero import ZeroRedundancyOptimizer

__all__ = [
    "DynamicGradScaler", "FSDPadaptOptimizer", "FusedAdam", "FusedAdamW", "FusedLion",
    "FusedMuon", "FusedOptimizer", "FusedSGD", "GradScaler", "ZeroRedundancyOptimizer",
    "cmake_prefix_path", "containers", "cuda_built", "digest", "load_fsdp_optimizer", "log_to",
    "mixed_precision", "muon_groups", "offload_fsdp_optimizer", "ops", "optimizer_on_device",
    "orthogonalize", "param_groups", "zero",
]  # fmt: skip

_MODULES = {
    **dict.fromkeys(("cmake_prefix_path", "cuda_built"), "_library"),
    **{name: "optim" for name in __all__ if name.startswith("Fused")},
    "ZeroRedundancyOptimizer": "zero",
    "digest": "optim.digest",
    "log_to": "optim.step_log",
    "muon_groups": "optim.muon_groups",
    "orthogonalize": "optim.orthogonalize",
    "param_groups": "optim.groups",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports subpackages when one of their names is first used: some take long to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("containers", "mixed_precision", "ops", "zero"):
        return importlib.import_module(f"{__name__}.{name}")
    package = _MODULES.get(name, "mixed_precision")
    return getattr(importlib.import_module(f"{__name__}.{package}"), name)

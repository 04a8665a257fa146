"""Lets torchtitan 0.2.2's Trainer run on a CPU with gloo, by replacing four things from outside."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def install() -> None:
    """Replaces the four things. Must run once, before any import of torchtitan."""
    # torchtitan/tools/utils.py looks up the device at import and falls back to "cuda".
    torch._utils._get_available_device_type = lambda: "cpu"

    # llama3 sets a divide factor of 1, which FSDP2 implements by PREMUL_SUM; gloo has no such
    # reduction, only SUM.
    set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor

    def divide_then_sum(self: FSDPModule, factor: float) -> None:
        set_gradient_divide_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_then_sum

    from torchtitan.components import metrics
    from torchtitan.distributed import utils as dist_utils

    metrics.DeviceMemoryMonitor = CPUMemoryMonitor
    dist_utils.set_pg_timeouts = set_pg_timeouts


class CPUMemoryMonitor:
    """Stands in for metrics.DeviceMemoryMonitor, which asks an accelerator for its statistics."""

    device_name = "cpu"
    device_capacity_gib = 0.0

    def __init__(self, device: str) -> None:
        pass

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """Does the same as torchtitan's, without `device_ids`, which gloo's barrier rejects."""
    dist.barrier()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [mesh.get_group() for mesh in meshes] + [None]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)

"""Peak memory and peak speed of a rank's device."""

import logging
import os
import platform
import re
import resource
import sys

import torch

logger = logging.getLogger(__name__)

_PEAK_FLOPS = (
    # Dense bf16, from the vendors' data sheets. The first matching pattern decides.
    (r"GB200|B200", 2.25e15),
    (r"H100.*PCIe", 756e12),
    (r"H100.*NVL", 835e12),
    (r"GH200|H100|H200|H800", 989e12),
    (r"\bH20\b", 148e12),
    (r"A100|A800", 312e12),
    (r"L40S", 362e12),
    (r"MI355X", 2.5e15),
    (r"MI300X|MI325X", 1.3e15),
    (r"MI250X", 191.5e12),  # one of two dies; each die is a device
)


def get_peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 operations per second of a device of this name, or None if unknown."""
    return next((flops for name, flops in _PEAK_FLOPS if re.search(name, device_name)), None)


class DeviceMemoryMonitor:
    """Reads the memory of one device, without waiting for it.

    On a CPU it reports the peak of the process's resident set, as both active and reserved. The
    system counts this peak from the start of the process and cannot reset it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(device)
            self.device_capacity = torch.cuda.get_device_properties(device).total_memory
        else:
            self.device_name = f"{platform.machine()} CPU"
            self.device_capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.reset_peak_stats()

    def get_peak_stats(self) -> dict[str, float]:
        """Returns the peaks since the last reset, by the tags of their metrics."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            active, reserved, retries, ooms = (
                stats.get(key, 0)
                for key in ("active_bytes.all.peak", "reserved_bytes.all.peak",
                            "num_alloc_retries", "num_ooms")
            )  # fmt: skip
        else:
            # getrusage(2): kilobytes, except on macOS.
            unit = 1 if sys.platform == "darwin" else 1024
            active = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            retries = ooms = 0
        if retries:
            logger.warning("%d CUDA memory allocations were retried so far", retries)
        if ooms:
            logger.warning("%d CUDA memory allocations failed so far", ooms)
        return {
            "memory/max_active(GiB)": active / 2**30,
            "memory/max_active(%)": 100 * active / self.device_capacity,
            "memory/max_reserved(GiB)": reserved / 2**30,
            "memory/max_reserved(%)": 100 * reserved / self.device_capacity,
            "memory/num_alloc_retries": retries,
            "memory/num_ooms": ooms,
        }

    def reset_peak_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

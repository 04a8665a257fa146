"""What the Trainer measures without waiting: skipped steps, the optimizer's time, and memory."""

import logging
import os
import platform
import re
import resource
import sys
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.state.devices import sent_to_host

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


class SkippedSteps:
    """Counts consecutive skipped steps from the control block's total.

    On a GPU the total is copied to the host asynchronously and read when it has arrived: the limit,
    with 0 none, takes effect a step or two late. Set `total` if the control block begins above 0.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = self.consecutive = 0
        self._coming: deque[tuple[Tensor, Any]] = deque()

    def note(self, skipped_steps: Tensor) -> None:
        """Records the total after a step: 0-dim, skipped steps so far."""
        if not skipped_steps.is_cuda:
            self.count(int(skipped_steps))
            return
        if (sent := sent_to_host(skipped_steps)) is not None:
            self._coming.append(sent)
        while self._coming and self._coming[0][1].query():
            self.count(int(self._coming.popleft()[0]))

    def wait(self) -> None:
        """Counts all steps, waiting for the device."""
        while self._coming:
            total, end = self._coming.popleft()
            end.synchronize()
            self.count(int(total))

    def count(self, total: int) -> None:
        """Records the total after a step, as a number on the host."""
        self.consecutive = self.consecutive + 1 if total > self.total else 0
        self.total = total

    @property
    def since_good(self) -> int:
        """Steps since the last step known not to be skipped, including steps not known yet."""
        return self.consecutive + len(self._coming)


class OptimizerTime:
    """A context manager that times each step. On a GPU, :meth:`mean` reads the events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=100 if self._on_gpu else None)
        self._started: Any = None

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: Any) -> None:
        self._steps.append((self._started, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mean(self) -> float:
        """Returns the mean seconds of the steps since the last call; 0 without steps."""
        seconds, count = 0.0, len(self._steps)
        while self._steps:
            started, ended = self._steps.popleft()
            if self._on_gpu:
                ended.synchronize()
            seconds += started.elapsed_time(ended) / 1000 if self._on_gpu else ended - started
        return seconds / max(count, 1)


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
        stats: dict[str, Any] = {}
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            peaks = [stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("active", "reserved")]
        else:
            # getrusage(2): kilobytes, except on macOS.
            unit = 1 if sys.platform == "darwin" else 1024
            peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit] * 2
        retries, ooms = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
        if retries:
            logger.warning("%d CUDA memory allocations were retried so far", retries)
        if ooms:
            logger.warning("%d CUDA memory allocations failed so far", ooms)
        shown = {}
        for kind, peak in zip(("active", "reserved"), peaks, strict=True):
            shown[f"memory/max_{kind}(GiB)"] = peak / 2**30
            shown[f"memory/max_{kind}(%)"] = 100 * peak / self.device_capacity
        return {**shown, "memory/num_alloc_retries": retries, "memory/num_ooms": ooms}

    def reset_peak_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

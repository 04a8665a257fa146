"""How fast a device's link and the host's memory are, and which of two ways to step that favors."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchopt_ext import _C

_BYTES = 64 << 20


class Bandwidths(NamedTuple):
    """GB/s of the link in the slower direction, and of the host's memory, reads and writes."""

    link: float
    host: float

    def step_on_host(self, states: float, gradient: float, weight: float, *, read: bool) -> bool:
        """Returns whether a step on the host is faster than one through mapped memory.

        Args:
            states: bytes for each element that lie on the host.
            gradient, weight: bytes for each element.
            read: whether steps read weights besides writing them.
        """
        down = gradient + (weight if read else 0.0)
        mapped = max(states / self.link, 2 * states / self.host)
        # A copy writes or reads the host's memory once, and the processor reads or writes it once.
        on_host = max(max(down, weight) / self.link, 2 * (states + down + weight) / self.host)
        return on_host < mapped


@functools.cache
def bandwidths(device: torch.device) -> Bandwidths:
    """Measures the link to a device, and the host's memory by this process's threads, once.

    Waits for the device.
    """
    like = torch.empty(_BYTES, dtype=torch.uint8, device="meta")
    here, other = _C.carve([like, like], stepped_on=device)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    up = _seconds(lambda: there.copy_(here, non_blocking=True), device)
    down = _seconds(lambda: here.copy_(there, non_blocking=True), device)
    copy = _seconds(lambda: other.copy_(here), device)
    return Bandwidths(_BYTES / max(up, down) / 1e9, 2 * _BYTES / copy / 1e9)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Returns the least time of several."""
    times = []
    for _ in range(4):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)

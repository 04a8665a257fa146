"""What steps over states on the host move, how fast link and memory are, and what that favors."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchopt_ext import _C

_BYTES = 64 << 20


class Crossing(NamedTuple):
    """Bytes of a step over states on the host.

    Attributes:
        down, up: moved over the link to the host, and back.
        memory: read and written in the host's memory.
        buffers: held on the host for gradients and weights beside the states.
    """

    down: float
    up: float
    memory: float
    buffers: float


def streamed(states: float) -> Crossing:
    """Returns what a step of the GPU moves that reads and writes states, mapped or staged."""
    return Crossing(states, states, 2 * states, 0)


def stepped_on_host(
    states: float, gradient: float, weight: float, *, read: bool, scales: float = 0.0
) -> Crossing:
    """Returns what a step of the CPU moves.

    Args:
        states: bytes that lie on the host.
        gradient, weight: bytes that come to the host, and return.
        read: whether steps read weights besides writing them.
        scales: bytes that lie on the GPU and are rewritten.
    """
    down, up = gradient + scales + (weight if read else 0), weight + scales
    # A copy writes or reads the host's memory once, and the processor reads or writes it once.
    return Crossing(down, up, 2 * (states + down + up), gradient + weight + scales)


class Bandwidths(NamedTuple):
    """GB/s of the link in the slower direction, and of the host's memory, reads and writes."""

    link: float
    host: float

    def seconds(self, moved: Crossing) -> float:
        """Returns the time of a step whose copies in both directions and work overlap."""
        return max(max(moved.down, moved.up) / self.link, moved.memory / self.host) / 1e9

    def step_on_host(self, states: float, gradient: float, weight: float, *, read: bool) -> bool:
        """Returns whether a step on the host is faster than one through mapped memory.

        Args:
            states: bytes for each element that lie on the host.
            gradient, weight: bytes for each element.
            read: whether steps read weights besides writing them.
        """
        on_host = stepped_on_host(states, gradient, weight, read=read)
        return self.seconds(on_host) < self.seconds(streamed(states))


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

"""What steps over states on the host move, how fast link and memory are, and what that favors."""

import functools
import os
import time
import warnings
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchopt_ext import _C

_BYTES = 64 << 20
_told: set[Path] = set()  # GPUs whose slow link a warning has named


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

    Waits for the device. Warns if the link has at most half of the rate that its PCIe allows.
    """
    like = torch.empty(_BYTES, dtype=torch.uint8, device="meta")
    here, other = _C.carve([like, like], stepped_on=device)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    up = _seconds(lambda: there.copy_(here, non_blocking=True), device)
    down = _seconds(lambda: here.copy_(there, non_blocking=True), device)
    copy = _seconds(lambda: other.copy_(here), device)
    found = Bandwidths(_BYTES / max(up, down) / 1e9, 2 * _BYTES / copy / 1e9)
    warn_of_slow_link(found.link, _pci_folder(device))
    return found


@functools.cache  # says it once
def warn_of_distance(device: torch.device) -> None:
    """Warns if a GPU's link lacks lanes, or if this process runs far from the GPU."""
    folder = _pci_folder(device)
    warn_of_slow_link(None, folder)
    warn_of_other_node(os.sched_getaffinity(0), folder)


def warn_of_other_node(cpus: Set[int], folder: Path) -> None:
    """Warns if none of these CPUs is on the NUMA node of a PCI device in sysfs."""
    try:
        node = int((folder / "numa_node").read_text())
        spans = [span.split("-") for span in (folder / "local_cpulist").read_text().split(",")]
        beside = {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return
    if node >= 0 and cpus.isdisjoint(beside):  # -1: the system does not know
        warnings.warn(
            f"this process may not run on NUMA node {node}, that of the GPU {folder.name}: states "
            f"on the host may lie far from it, and steps on the host access another node's memory. "
            f"Start the process with numactl --cpunodebind={node}",
            stacklevel=3,
        )


def warn_of_slow_link(link: float | None, folder: Path) -> None:
    """Warns, once, if a link has at most half of the rate that its PCI device in sysfs allows.

    Args:
        link: its GB/s. None: what its lanes allow. Their speed does not count then: it is lower
            while a GPU is idle.
    """

    def lanes(which: str) -> tuple[float, int]:
        speed = (folder / f"{which}_link_speed").read_text().split()[0]  # "32.0 GT/s PCIe"
        return float(speed), int((folder / f"{which}_link_width").read_text())

    try:
        (speed, width), (now, used) = lanes("max"), lanes("current")
    except (OSError, ValueError, IndexError):
        return
    nominal = speed * width / 8 * 128 / 130  # GB/s: PCIe 3 to 5 send 130 bits for 128
    if link is None:
        moves, more = nominal * used / width, ""
    else:
        moves = link
        more = (
            f", at {now:g} of {speed:g} GT/s, and may be shared, or lead to another NUMA node than "
            f"this process runs on"
        )
    if moves <= nominal / 2 and folder not in _told:
        _told.add(folder)
        warnings.warn(
            f"the link to the GPU moves {moves:.1f} GB/s, at most half of the {nominal:.1f} GB/s "
            f"of its PCIe: it has {used} of {width} lanes{more}",
            stacklevel=3,
        )


def _pci_folder(device: torch.device) -> Path:
    """Returns the folder of a GPU in sysfs, which the tests' devices do not have."""
    if device.type != "cuda":
        return Path(os.devnull)
    its: Any = torch.cuda.get_device_properties(device)
    address = f"{its.pci_domain_id:04x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
    return Path("/sys/bus/pci/devices") / address


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

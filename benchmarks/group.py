"""Cases to time, and groups of cases that are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shapes import Shapes


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call`` does it once.

    ``bytes_per_parameter`` is how much the passes read and write, counted from the algorithm, and
    None for other libraries. ``roofline`` is the operation of the plain-loop case in the group that
    takes the time that memory allows.
    """

    implementation: str
    operation: str
    call: Callable[[], object]
    bytes_per_parameter: float | None
    roofline: str | None = None


@dataclass
class Group:
    """Cases on one set of tensors. Ratios are taken inside a group only.

    The table's ratios compare with the implementation ``baseline``. ``shown`` are the
    implementations that get rows, all if None. ``rounds`` limits the rounds of slow cases.
    """

    name: str
    shapes: Shapes
    cases: list[Case]
    baseline: str | None
    shown: tuple[str, ...] | None = None
    rounds: int | None = None
    flushed: bool = False  # timed once more with caches flushed

"""What is timed: cases, and groups of cases that are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shapes import Shapes


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call`` does it once.

    ``bytes_per_parameter`` is what its passes read and write, counted from the algorithm; None for
    another library's.
    ``roofline`` names the plain-loop case of the group (by its operation) that takes what memory
    allows.
    """

    implementation: str
    operation: str
    call: Callable[[], object]
    bytes_per_parameter: float | None
    roofline: str | None = None


@dataclass
class Group:
    """Cases on one set of tensors. Ratios are taken inside a group only.

    ``baseline`` is the implementation that the table's ratios compare with. ``shown`` are the
    implementations that get rows, all if None. ``rounds`` is for cases too slow for all rounds.
    """

    name: str
    shapes: Shapes
    cases: list[Case]
    baseline: str | None
    shown: tuple[str, ...] | None = None
    rounds: int | None = None
    flushed: bool = False  # timed once more with caches flushed

"""Builds the groups one after another and times them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from group import Group
from rows import Row, rows_of
from shapes import parameters
from timing import Clock, Flush, time_in_turn
from tqdm import tqdm

Build = Callable[[], Group]
CACHED = 10_000_000  # parameters; a smaller set fits into the caches of some machines


def measure(
    builds: Sequence[Build], rounds: int, clock: Clock, flush: Callable[[], Flush]
) -> tuple[list[Row], list[str]]:
    """Returns the rows of all groups, sorted by tensor set, and the groups' import errors.

    A group is built when its turn comes and freed before the next, to save memory.
    """
    rows: list[Row] = []
    missing: dict[str, None] = {}
    for build in tqdm(builds, desc="groups"):
        try:
            group = build()
        except ImportError as error:
            missing[str(error)] = None
            continue
        count = min(rounds, group.rounds or rounds)
        calls = 5 if parameters(group.shapes) < CACHED else 1
        rows += rows_of(group.name, group, time_in_turn(group.cases, count, calls, clock))
        if group.flushed:
            samples = time_in_turn(group.cases, count, 3, clock, flush())
            rows += rows_of(f"{group.name}, caches flushed", group, samples)
        del group
        gc.collect()
    sets = list(dict.fromkeys(row["set"] for row in rows))
    return sorted(rows, key=lambda row: sets.index(row["set"])), list(missing)

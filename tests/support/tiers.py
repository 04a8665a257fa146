"""Which combinations of parameters the fast tests try. The slow ones try all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

EMPTY: frozenset[Any] = frozenset()


def mark_slow_combinations(items: Sequence[pytest.Item]) -> None:
    """Marks as slow what :func:`covering` leaves out of the cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        left_out = {*range(len(cases))} - {*covering([values_of(case) for case in cases])}
        for i in left_out:
            cases[i].add_marker(pytest.mark.slow)


def values_of(item: pytest.Item) -> frozenset[tuple[str, int]]:
    """Returns a test's parameters with their values, which combinations share: by identity."""
    spec = getattr(item, "callspec", None)
    return frozenset((name, id(value)) for name, value in spec.params.items()) if spec else EMPTY


def in_tier(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns what a worker script tries of its cases: all if "complete" is among its arguments."""
    given = [*cases]
    if "complete" in sys.argv:
        return given
    return [given[i] for i in covering([frozenset(enumerate(map(str, case))) for case in given])]


def covering(cases: Sequence[frozenset[Any]]) -> list[int]:
    """Returns cases that have every value of every parameter, and few of their combinations."""
    chosen: list[int] = []
    missing = EMPTY.union(*cases)
    while missing or not chosen:
        # A case with nothing new would be a combination more.
        chosen.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[chosen[-1]]
    return chosen

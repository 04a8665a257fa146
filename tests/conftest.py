"""Sorts the tests of a run, and keeps what was imported for them from garbage collection."""

from __future__ import annotations

import gc

import pytest

from .support.tiers import mark_slow_combinations


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests with long time limits first, so that no worker ends with only a long test left."""
    mark_slow_combinations(items)

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker else 0.0

    items.sort(key=limit, reverse=True)


def pytest_collection_finish() -> None:
    """Hides a million objects of imported modules from collections and searches of all objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()

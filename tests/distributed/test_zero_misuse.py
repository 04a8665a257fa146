"""Unusual calls around a sharded optimizer's steps: zero_misuse_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


def test_unusual_calls(run_two_ranks: Callable[[str], Results]) -> None:
    assert_passed(run_two_ranks("zero_misuse_worker.py"), 21)

"""Ranks of a group that act differently: segments, worlds, subgroups, uneven inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


def test_ranks_that_act_differently(run_ranks: Callable[[str, int], Results]) -> None:
    assert_passed(run_ranks("zero_groups_worker.py", 4), 23)

"""Distributed checkpoints move between world sizes. Each rank writes and reads only its part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = [pytest.mark.timeout(240), pytest.mark.newest_torch]

CASES = {1: 14, 4: 8, 3: 9, 2: 29}
"""The number of cases by world size. Each size loads the checkpoint of the size before."""


def test_checkpoints_of_all_world_sizes(run_ranks: Callable[[str, int], Results]) -> None:
    for size, number in CASES.items():
        assert_passed(run_ranks("zero_checkpoint_worker.py", size), number)

"""FSDPadaptOptimizer on 1, 2 and 4 gloo ranks: equal bits, one decision, checkpoints that move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = [pytest.mark.timeout(240), pytest.mark.newest_torch]

CASES = {4: 57, 2: 41, 1: 4}
"""The number of cases by world size. Each size loads the checkpoint of the size before."""


def test_all_world_sizes(run_ranks: Callable[[str, int], Results]) -> None:
    for size, number in CASES.items():
        assert_passed(run_ranks("mixed_precision_worker.py", size), number)

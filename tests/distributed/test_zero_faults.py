"""ZeroRedundancyOptimizer on two and four gloo ranks: faults of torch's class, and parity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]


@pytest.mark.parametrize(("ranks", "cases"), [(2, 156), (4, 22)])
def test_faults_and_parity(
    run_ranks: Callable[[str, int], Results], ranks: int, cases: int
) -> None:
    assert_passed(run_ranks("zero_faults_worker.py", ranks), cases)

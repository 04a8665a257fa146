"""The step engine over gloo ranks: one decision, and the bits of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize(("ranks", "cases"), [(2, 41), (4, 2)])
def test_step_engine(run_ranks: Callable[[str, int], Results], ranks: int, cases: int) -> None:
    assert_passed(run_ranks("step_engine_worker.py", ranks), cases)

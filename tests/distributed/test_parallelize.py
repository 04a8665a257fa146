"""Each kind of parallelism computes what one process does on the same batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .rank_results import Results, assert_passed

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]
OLD = pytest.mark.skipif(torch.__version__ < "2.12", reason="sends to itself, which gloo cannot")


@pytest.mark.parametrize(
    ("ranks", "chosen", "cases"),
    [
        (2, "data parallel", 14),
        pytest.param(2, "two ranks", 13, marks=pytest.mark.slow),
        pytest.param(2, "v-shaped", 1, marks=[pytest.mark.slow, OLD]),
        pytest.param(4, "four ranks", 9, marks=pytest.mark.slow),
    ],
)
def test_parallelism(
    run_ranks: Callable[..., Results], ranks: int, chosen: str, cases: int
) -> None:
    assert_passed(run_ranks("parallelize_worker.py", ranks, chosen), cases)

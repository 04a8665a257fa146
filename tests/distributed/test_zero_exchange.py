"""gloo ranks exchange text and errors, and send optimizer state to a single rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]


def test_exchanges(run_ranks: Callable[[str, int], Results]) -> None:
    assert_passed(run_ranks("zero_exchange_worker.py", 3), 34)

"""Steps in backward, and deferred clipping, over two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


def test_steps_of_containers(run_two_ranks: Callable[[str], Results]) -> None:
    assert_passed(run_two_ranks("containers_worker.py"), 24)

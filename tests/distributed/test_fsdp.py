"""Low-precision copies of shards on two gloo ranks replace FSDP2's casts and have their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


def test_training_is_that_without(run_two_ranks: Callable[[str], Results]) -> None:
    assert_passed(run_two_ranks("fsdp_worker.py"), 26)

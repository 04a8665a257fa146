"""A norm measured in backward on two ranks gives the bits of a norm measured in the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, assert_passed

pytestmark = pytest.mark.timeout(150)


def test_bits_are_those_of_the_ordinary_step(run_two_ranks: Callable[[str], Results]) -> None:
    assert_passed(run_two_ranks("norm_in_backward_worker.py"), 16)

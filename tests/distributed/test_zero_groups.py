"""Ranks of a group that do different things: segments, worlds, sub-groups, uneven inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(150)

Results = list[dict[str, dict[str, Any]]]  # by rank and case

ROUNDING = 1e-6  # averages of equal gradients, and other orders of summing


@pytest.fixture(scope="module")
def results(run_ranks: Callable[[str, int], Results]) -> Results:
    return run_ranks("zero_groups_worker.py", 4)


def case(results: Results, name: str) -> list[dict[str, Any]]:
    """Every rank's result; they must agree on all but what is local."""
    for rank in results:
        assert "error" not in rank[name], rank[name]["error"]
    common = [{k: v for k, v in rank[name].items() if k != "local"} for rank in results]
    assert all(other == common[0] for other in common)
    return [rank[name] for rank in results]


@pytest.mark.parametrize("name", ["segments", "nested", "segments, unused", "nested, unused"])
def test_a_backward_pass_reduces_every_bucket_once(results: Results, name: str) -> None:
    """Under reentrant checkpointing, in segments of other lengths on every rank."""
    found = case(results, name)[0]
    assert found["off"] <= ROUNDING
    assert found["reductions"] == 3 * found["buckets"] > 3 * 7


def test_worlds_made_of_sub_groups(results: Results) -> None:
    for rank, expected in enumerate(["4", "341", "234", "234"]):
        found = case(results, "worlds")[rank]["local"]
        assert list(found) == list(expected)
        assert max(found.values()) <= ROUNDING

"""A norm measured in backward on two ranks gives the bits of a norm measured in the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, each_rank

pytestmark = pytest.mark.timeout(150)

MEASURED = {
    "ddp": True,
    "ddp, views": True,
    "ddp, small buckets": True,
    "ddp, compressed": True,
    "ddp, micro-batches": True,
    "ddp, no sync": True,
    "ddp, changed": False,
    "ddp without": False,
    "by hand": False,
    "fsdp": True,
    "fsdp, micro-batches": True,
    "fsdp, changed": False,
    "hsdp": True,
    "zero": True,
    "zero, micro-batches": True,
    "zero, hook": True,
}


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("norm_in_backward_worker.py")


@pytest.mark.parametrize("way", MEASURED)
def test_bits_are_those_of_the_ordinary_step(results: Results, way: str) -> None:
    found = each_rank(results, way)
    for rank, expected in zip(found, each_rank(results, f"{way}, read again"), strict=True):
        assert rank["norms"] == expected["norms"] and "nan" not in rank["norms"]
        assert rank["local"] == expected["local"]
        assert rank["warned"] == ("changed" in way)
        assert any(rank["counts"]) == MEASURED[way], rank["counts"]
        if MEASURED[way]:
            assert rank["counts"][-1] >= 1

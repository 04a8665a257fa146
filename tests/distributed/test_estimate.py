"""The estimates of optim/estimate.py equal what two ranks allocate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, each_rank

pytestmark = pytest.mark.timeout(150)
SHARDINGS = ("ddp", "zero1", "balanced", "zero2", "fsdp")
CASES = [*SHARDINGS, *(f"{sharding} fp32" for sharding in SHARDINGS), "zero2 remainder"]
CASES += [f"{s} int8{more}" for s in ("ddp", "zero1", "fsdp") for more in ("", " every matrix")]


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("estimate_worker.py")


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_was_estimated(results: Results, name: str) -> None:
    for rank in each_rank(results, name):
        found, estimated = rank["found"], rank["estimated"]
        for part in ("weights", "gradients", "masters", "moments"):
            assert found[part] == estimated[part], part
        # Small tensors' moments begin at multiples of 64 bytes. A cut one becomes up to three.
        assert 0 <= found["moments_allocated"] - found["moments"] <= 64 * 2 * 21
        assert estimated["steps"] <= found["steps"] <= 3 * estimated["steps"]

"""The sharded step gives the same bits for every world size, partition and way to reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from .rank_results import Results, agreed, case

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]

WORLD_SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
Runs = Callable[[int], Results]  # by world size
HELD = ("fp32", "master", "remainder", "stochastic", "int8")
WAYS = (
    "greedy, averaged",
    "greedy, ddp",
    "balanced, averaged",
    "balanced, gathered",
    "balanced, ddp",
    "balanced, hook",
    "balanced, sharded",
)


@pytest.fixture(scope="module")
def runs(run_ranks: Callable[[str, int], Results]) -> Runs:
    return functools.cache(lambda size: run_ranks("zero_sharded_worker.py", size))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["norms"] == other["norms"]
    assert one["params"] == other["params"]
    assert one["local"] == other["local"]
    assert one["strides"] == other["strides"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_one_process(runs: Runs, size: int, held: str, way: str) -> None:
    """Norms, parameters and consolidated state are equal after clipped steps and a skipped step."""
    alone = case(runs(1), f"{held}: none, averaged")
    assert len({n for n in alone["norms"] if n != "nan"}) > 1 and "nan" in alone["norms"]
    sharded = case(runs(size), f"{held}: {way}")
    if size == 3 and "ddp" in way:  # DDP divides by 3 before it adds: its averages are rounded
        same(sharded, case(runs(size), f"{held}: greedy, ddp"))
    else:
        same(sharded, alone)


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_gradients_accumulate_over_backward_passes(runs: Runs, size: int) -> None:
    alone = case(runs(1), "twice: none, averaged")
    assert alone["params"] != case(runs(1), "fp32: none, averaged")["params"]
    same(case(runs(size), "twice: balanced, sharded"), alone)
    same(case(runs(size), "twice: balanced, hook"), alone)


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize(
    "way", ["greedy, averaged", "balanced, averaged", "balanced, hook", "balanced, sharded"]
)
def test_gradient_scaler(runs: Runs, size: int, way: str) -> None:
    """All scales back off if one rank overflows. Shards reject unscale_() and torch's scaler."""
    alone = case(runs(1), "scaled: none, averaged")
    found = case(runs(size), f"scaled: {way}")
    same(found, alone)
    assert found["scale"] == alone["scale"] == 32.0
    if "averaged" not in way:
        assert "leave unscale_() out" in found["refused"]
        assert "use torchopt_ext.GradScaler" in found["refused"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["greedy, averaged", "balanced, averaged", "balanced, sharded"])
def test_frozen_thawed_and_unused_parameters(runs: Runs, size: int, way: str) -> None:
    same(case(runs(size), f"frozen: {way}"), case(runs(1), "frozen: none, averaged"))


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_a_parameter_used_on_one_rank_is_updated_on_all(runs: Runs, size: int) -> None:
    assert case(runs(size), "unused on one rank")["moved"]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_parameters_may_arrive_during_the_next_forward(runs: Runs, size: int) -> None:
    result = case(runs(size), "lazily")
    assert result["under_way"]
    assert result["params"] == case(runs(1), "lazily")["params"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_norms_of_complex_gradients(runs: Runs, size: int, partition: str) -> None:
    assert agreed(runs(size), f"complex: {partition}") == agreed(runs(1), "complex: none") * size


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_rank_holds_its_share_and_no_more(runs: Runs, size: int) -> None:
    """In every bucket the shares differ by at most a block of 4,096 elements."""
    results = agreed(runs(size), "shares")
    held = [result["local"]["elements"] for result in results]
    assert sum(held) == results[0]["total"]
    buckets = len(results[0]["local"]["windows"])
    assert max(held) - min(held) <= buckets * (4096 + 64)
    for result in results:
        assert result["local"]["storage"] == 8 * result["local"]["elements"]  # two fp32 moments
        assert result["aligned"]

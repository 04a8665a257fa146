"""The step engine over two gloo ranks: one decision, and the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .rank_results import Results, case

pytestmark = pytest.mark.timeout(150)

HELD = ("master", "remainder", "stochastic", "stochastic moments")  # ways to hold bf16 weights


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("step_engine_worker.py")


def number(result: dict[str, Any], field: str) -> float:
    return float.fromhex(result[field])


BITWISE = {
    "process group": "unsharded",
    "rows": "unsharded",
    "mixed rows": "unsharded",
    "hybrid 2x1": "unsharded",
    "hybrid 1x2": "unsharded",
    "two meshes": "unsharded",
    "resharded gradients": "unsharded",
    "partial, replicated": "summed gradients",
    "partial, mixed rows": "summed gradients",
    **{f"rows {held}": f"unsharded {held}" for held in HELD},
    **{f"rows {held}, resumed": f"unsharded {held}" for held in HELD},
    **{f"fsdp {held}": f"model {held}" for held in HELD},
}


@pytest.mark.parametrize("name", BITWISE)
def test_bits_are_those_of_one_process(results: Results, name: str) -> None:
    """Norm, clip factor, and parameters and states after clipped steps are equal bitwise."""
    sharded, whole = case(results, name), case(results, BITWISE[name])
    assert 0 < number(whole, "clip_factor") < 1
    for field in ("grad_norm", "clip_factor", "params", "state"):
        assert sharded[field] == whole[field]


def test_pipeline_stages_clip_by_one_norm(run_ranks: Callable[[str, int], Results]) -> None:
    """Also if a stage has parameters on a mesh of one rank beside parameters on a larger mesh."""
    found = run_ranks("step_engine_worker.py", 4)
    whole = {k: v for k, v in case(found, "unsharded").items() if k != "local"}
    assert case(found, "pipeline stages") == whole
    assert case(found, "pipeline stages, one-rank mesh") == whole


def test_a_rank_without_gradients_takes_part(results: Results) -> None:
    """A rank without gradients gets the norm of the rank that has gradients."""
    assert number(case(results, "rank without gradients"), "grad_norm") == 12**0.5


def test_ranks_agree_on_a_parameter_of_another_mesh_without_a_gradient(results: Results) -> None:
    """It is unfrozen, gets gradients on rank 0 only, and is frozen again with state on rank 0."""
    found = [rank["unfrozen late"] for rank in results]
    for rank in found:
        assert "error" not in rank, rank["error"]
        assert rank["squares"] == pytest.approx([8, 12, 12, 8], rel=1e-12)
    assert [rank["late has state"] for rank in found] == [True, False]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_random_rounding_does_not_depend_on_sharding(
    results: Results, held: str, split: str
) -> None:
    """Random bits belong to an element of the parameter, also in a split by columns."""
    sharded = case(results, f"{split} {held}, unclipped")
    whole = case(results, f"unsharded {held}, unclipped")
    assert sharded["params"] == whole["params"]
    assert sharded["state"] == whole["state"]


def test_the_ways_to_hold_weights_differ(results: Results) -> None:
    """At least three of the four ways give different weights, so the tests above are not empty."""
    params = {held: tuple(case(results, f"unsharded {held}")["params"]) for held in HELD}
    assert len(set(params.values())) >= 3
    assert all(p != tuple(case(results, "unsharded")["params"]) for p in params.values())


@pytest.mark.parametrize(
    ("sharded", "whole"),
    [
        ("rows", "unsharded"),
        *[(f"rows {held}", f"unsharded {held}") for held in HELD],
        *[(f"columns {held}, unclipped", f"unsharded {held}, unclipped") for held in HELD],
        *[(f"fsdp {held}", f"model {held}") for held in HELD],
    ],
)
def test_what_shards_see_adds_up(results: Results, sharded: str, whole: str) -> None:
    """Digests modulo 2**64 and counts add up exactly, squares of norms up to rounding."""
    mine = [rank[sharded]["local"] for rank in results]
    exact = results[0][whole]["local"]
    digests = [sum(pair) % 2**64 for pair in zip(*[m["digests"] for m in mine], strict=True)]
    assert digests == exact["digests"]
    assert len(set(digests)) == len(digests)
    assert [sum(pair) for pair in zip(*[m["lost"] for m in mine], strict=True)] == exact["lost"]
    for squares in ("grad_squares", "update_squares"):
        summed = [sum(pair) for pair in zip(*[m[squares] for m in mine], strict=True)]
        assert summed == pytest.approx(exact[squares], rel=1e-12)
        assert min(summed) > 0


def test_replicas_have_equal_digests(results: Results) -> None:
    """A replicated parameter has the digest of the unsharded parameter on every rank."""
    whole = results[0]["unsharded"]["local"]["digests"]
    for rank in results:
        local = rank["mixed rows"]["local"]["digests"]
        assert [local[i] for i in (0, 2, 4)] == [whole[i] for i in (0, 2, 4)]


def test_columns_and_rows_and_replicas_in_one_norm(results: Results) -> None:
    """The norms agree to 2**-50, because shards cut the sum of squares differently."""
    mixed, whole = case(results, "mixed"), case(results, "unsharded")
    expected = number(whole, "grad_norm")
    assert abs(number(mixed, "grad_norm") - expected) <= 2**-50 * expected


@pytest.mark.parametrize(
    "name",
    [
        *("process group", "rows", "rows, unscaled before", "fsdp"),
        *("rows, stock scaler", "rows, sharded scaler", "fsdp, stock scaler"),
    ],
)
def test_an_overflow_on_one_rank_skips_on_all(results: Results, name: str) -> None:
    """An overflow on one rank in steps 2 and 5 of 8 makes both ranks skip and back off."""
    found = [rank[f"overflow {name}"] for rank in results]
    for rank in found:
        assert "error" not in rank, rank["error"]
    assert found[0]["scales"] == found[1]["scales"]
    # grows after every second good step in a row
    exponents = [10, 11, 10, 10, 11, 10, 10, 11]
    assert found[0]["scales"] == [2.0**e for e in exponents]
    for rank in found:
        assert rank["moved"] == [step not in (2, 5) for step in range(8)]
        assert set(rank["steps"]) == {6.0}


def test_stock_scaler_is_rejected_with_plain_shards(results: Results) -> None:
    result = case(results, "stock scaler, plain shards")
    assert "use torchopt_ext.GradScaler" in result["message"]


def test_partial_gradients_travel_together(results: Results) -> None:
    """Any number of gradients takes one collective, and one more to agree on overflow."""
    few, many = (case(results, name) for name in ("partial, replicated", "partial, many"))
    assert sum(few["collectives"].values()) == sum(many["collectives"].values()) == 2


def test_gradients_of_shards_are_written_back(results: Results) -> None:
    result = case(results, "written back")
    assert not result["message"]
    assert result["moved"]
    assert result["norm"] == pytest.approx(1.0, rel=1e-5)


def test_redistributed_gradients_are_not_left_as_they_were(results: Results) -> None:
    """The step uses copies of redistributed gradients. It raises or writes the copies back."""
    result = case(results, "written back, resharded")
    if result["message"]:
        assert "gradient" in result["message"]
        assert not result["moved"]
    else:
        assert result["norm"] == pytest.approx(1.0, rel=1e-5)


def test_sequence_parallel_block(results: Results) -> None:
    """A block under tensor parallelism trains like one process, up to rounding."""
    parallel, single = case(results, "sequence parallel"), case(results, "one process")
    assert any("Partial" in kind for kind in parallel["kinds"])
    assert any("Shard(dim=1)" in kind for kind in parallel["kinds"])
    assert 0 < single["clip_factor"] < 1
    assert parallel["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
    for mine, theirs in zip(parallel["values"], single["values"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["unfinished", "unfinished in a DTensor"])
def test_a_gradient_still_on_its_way_is_waited_for(results: Results, name: str) -> None:
    result = case(results, name)
    assert result["kind"] == "AsyncCollectiveTensor"
    assert result["grad_norm"] == pytest.approx(2 * 12**0.5)  # the sum is 1 - 3 in 12 elements
    assert result["moved_up"]

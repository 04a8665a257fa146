"""One gradient norm over two gloo ranks: through a process group, and for DTensor parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(150)

Results = list[dict[str, dict[str, Any]]]  # by rank and case


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("norm_worker.py")


def case(results: Results, name: str) -> dict[str, Any]:
    """The case's result, which both ranks must agree on."""
    for rank in results:
        assert "error" not in rank[name], rank[name]["error"]
    assert results[0][name] == results[1][name]
    return results[0][name]


def number(result: dict[str, Any], field: str) -> float:
    return float.fromhex(result[field])


BITWISE = {
    "process group": "unsharded",
    "rows": "unsharded",
    "rows bfloat16": "unsharded bfloat16",
    "replicated": "unsharded",
    "mixed": "unsharded",
    "partial gradients": "unsharded",
    "partial gradients of rows": "unsharded",
}


@pytest.mark.parametrize("name", BITWISE)
def test_bits_are_those_of_one_process(results: Results, name: str) -> None:
    """Norm, clip factor and, after three clipped steps, every parameter."""
    sharded, whole = case(results, name), case(results, BITWISE[name])
    for field in ("grad_norm", "clip_factor"):
        assert sharded[field] == whole[field]
    assert 0 < number(whole, "clip_factor") < 1
    assert sharded["params"] == whole["params"]


def test_pipeline_stages_clip_by_one_norm(run_ranks: Callable[[str, int], Results]) -> None:
    found = run_ranks("norm_worker.py", 4)
    assert all(rank["pipeline stages"] == rank["unsharded"] for rank in found), found


def test_columns(results: Results) -> None:
    """Blocks of the sum of squares are cut differently: equal to 2**-50."""
    columns, whole = case(results, "columns"), case(results, "unsharded")
    expected = number(whole, "grad_norm")
    assert abs(number(columns, "grad_norm") - expected) <= 2**-50 * expected


@pytest.mark.parametrize("name", ["rows", "columns", "replicated", "partial gradients"])
def test_state_of_dtensors(results: Results, name: str) -> None:
    """Moments are placed as their parameter; every parameter counts its steps, empty shards too."""
    result = case(results, name)
    assert result["state_is_sharded"]
    assert result["steps"] == [3] * 5


def test_norm_is_torchs(results: Results) -> None:
    norms = [number(case(results, name), "grad_norm") for name in ("unsharded", "torch")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_one_bad_rank_stops_all(results: Results) -> None:
    result = case(results, "skip together")
    assert result["unchanged"]
    assert result["steps"] == [1] * 5
    assert number(result, "found_inf") == 1
    assert number(result, "skipped_steps") == 1


def test_a_rank_without_gradients_takes_part(results: Results) -> None:
    """It knows the norm, which is that of the rank that has gradients."""
    result = case(results, "rank without gradients")
    assert result["grad_norm"] == case(results, "unsharded")["grad_norm"]

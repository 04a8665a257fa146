"""Distributed checkpoints move between world sizes. Each rank writes and reads only its part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, agreed

pytestmark = [pytest.mark.timeout(240), pytest.mark.newest_torch]

WORLD_SIZES = (1, 4, 3, 2)  # in this order: each size loads the checkpoint of the size before
NAMES = ("fused", "fp32", "remainder", "remainder8", "adamw", "sgd")


@pytest.fixture(scope="module")
def runs(run_ranks: Callable[[str, int], Results]) -> dict[int, Results]:
    return {size: run_ranks("zero_checkpoint_worker.py", size) for size in WORLD_SIZES}


chained = pytest.mark.parametrize("name", NAMES)
sizes = pytest.mark.parametrize("size", WORLD_SIZES)


@chained
@sizes
def test_state_is_the_same_at_every_world_size(runs: dict[int, Results], size: int, name: str):
    first = agreed(runs[size], f"chain {name}")[0]
    assert first["local"]["state"] == ""
    assert first["next step"] == ""


@chained
@sizes
def test_an_unsharded_optimizer_loads_it(runs: dict[int, Results], size: int, name: str) -> None:
    local = agreed(runs[size], f"chain {name}")[0]["local"]
    assert local["keys"] == ""
    assert local["unsharded"] == ""


@chained
@sizes
def test_ranks_write_and_read_their_parts_only(runs: dict[int, Results], size: int, name: str):
    ranks = agreed(runs[size], f"chain {name}")
    for what in ("held", "allocated"):
        assert sum(rank["local"][what] for rank in ranks) == ranks[0]["whole"]
        assert max(rank["local"][what] for rank in ranks) <= 1.7 * ranks[0]["whole"] / size


@chained
def test_rows_are_cut(runs: dict[int, Results], name: str) -> None:
    """Ranks cut rows of 2-D, 3-D and channels-last tensors, so the other tests cover this case."""
    found = agreed(runs[4], f"chain {name}")[0]["local"]["cut inside a row"]
    assert found == [[2, 50, 200], [3, 64, 16, 15], [3, 10000]]


@sizes
@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_ranks_without_parameters(runs: dict[int, Results], size: int, partition: str) -> None:
    ranks = agreed(runs[size], f"tiny {partition}")
    assert sorted(rank["local"] for rank in ranks) == [0] * (size - 1) + [1]
    assert ranks[0]["difference"] == ""
    assert ranks[0]["steps"] == [1, 1]


def test_a_parameter_without_state_has_none(runs: dict[int, Results]) -> None:
    assert agreed(runs[2], "without state")[0] == {"before": True, "after": 0}


def test_other_masters(runs: dict[int, Results]) -> None:
    for rank in agreed(runs[2], "other masters"):
        assert rank == {"weights": "", "local": ""}


def test_subgroup(runs: dict[int, Results]) -> None:
    assert agreed(runs[3][1:], "subgroup")[0] == {"difference": ""}


@pytest.mark.parametrize("stager", ["async", "async, writer"])
def test_later_steps_do_not_change_what_is_written(runs: dict[int, Results], stager: str) -> None:
    assert runs[2][0][stager] == {"saved": "", "moved": True}


@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_a_consolidated_optimizer_saves_and_loads(runs: dict[int, Results], partition: str) -> None:
    assert agreed(runs[2], f"consolidated {partition}")[0]["local"] == ["", ""]


def test_a_part_of_the_state_loads_where_it_was_only(runs: dict[int, Results]) -> None:
    same, other = agreed(runs[2], "part")[0], agreed(runs[2], "part of another")[0]
    for found in (same, other):
        assert "`consolidate_state_dict(to=...)` on all ranks" in found["torch.save"]
    assert "raised" not in same and same["changed"] == ""
    assert "but this rank owns" in other["local"] and other["changed"] == ""


@pytest.mark.parametrize("value", ["function", "sparse", "number as key"])
def test_what_dcp_would_not_give_back_is_named(runs: dict[int, Results], value: str) -> None:
    first, last = (found["local"] for found in agreed(runs[2], value))
    assert (first["raised"], last["raised"]) == ("ValueError", "TypeError")
    assert first["message"] == f"rank 1: TypeError: {last['message']}"
    assert last["message"].startswith("state.1.extra")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("other shape", "ValueError", "exp_avg of parameter 6 has shape (70, 130), expected (70, "),
        ("transposed", "ValueError", "exp_avg of parameter 6 has shape (70, 130), expected (130, "),
        ("fewer parameters", "ValueError", "group 0 has 6 parameters, expected 5"),
        ("other groups", "ValueError", "2 parameter groups, expected 1"),
        ("other key", "ValueError", "no 'optim'; it has ['optimizer']"),
        ("missing file", "RuntimeError", "reading the optimizer state: rank "),
        ("truncated file", "RuntimeError", "reading the optimizer state: rank "),
        ("no metadata", "RuntimeError", "the checkpoint: ValueError: there is no checkpoint in"),
        ("incomplete", "ValueError", "of its 20000 elements, so not all ranks saved theirs"),
        ("pickled code", "RuntimeError", "Weights only load failed"),
        ("pickled metadata", "RuntimeError", ".metadata refers to posix.mkdir"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(
    runs: dict[int, Results], name: str, error: str, message: str
) -> None:
    found = agreed(runs[2], name)[0]
    assert found["raised"] == error
    assert message in found["message"]
    assert found["changed"] == ""
    assert found["steps"]


def test_no_pickled_code_runs(runs: dict[int, Results]) -> None:
    for name in ("pickled code", "pickled metadata"):
        assert agreed(runs[2], name)[0]["ran"] == []

"""Ranks of a group that act differently: segments, worlds, subgroups, uneven inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, agreed

pytestmark = pytest.mark.timeout(150)

ROUNDING = 1e-6  # from averages of equal gradients, and from other orders of summing


@pytest.fixture(scope="module")
def results(run_ranks: Callable[[str, int], Results]) -> Results:
    return run_ranks("zero_groups_worker.py", 4)


@pytest.mark.parametrize("name", ["segments", "nested", "segments, unused", "nested, unused"])
def test_a_backward_pass_reduces_every_bucket_once(results: Results, name: str) -> None:
    """Reentrant checkpointing has segments of another length on every rank."""
    found = agreed(results, name)[0]
    assert found["off"] <= ROUNDING
    assert found["reductions"] == 3 * found["buckets"] > 3 * 7


def test_optimizers_reduce_in_the_order_in_which_they_were_built(results: Results) -> None:
    """The first one, which no other can precede, reduces during the pass."""
    found = agreed(results, "other orders")[0]
    assert found["off"] <= ROUNDING
    assert found["early"] == [True, False]


@pytest.mark.parametrize("change", ["group", "two steps"])
def test_gradients_of_unfrozen_parameters_are_not_lost(results: Results, change: str) -> None:
    assert agreed(results, f"unfrozen, {change}")[0]["off"] <= ROUNDING


def test_worlds_made_of_sub_groups(results: Results) -> None:
    for rank, expected in enumerate(["4", "341", "234", "234"]):
        found = agreed(results, "worlds")[rank]["local"]
        assert list(found) == list(expected)
        assert max(found.values()) <= ROUNDING


def test_dropped_optimizers_keep_no_group(results: Results) -> None:
    for rank in agreed(results, "dropped"):
        assert rank["local"] == {"descriptors": 0, "threads": 0, "groups": 0}


@pytest.mark.parametrize(
    "how",
    [
        *("greedy", "AdamW", "bucket view", "balanced", "hook"),
        *("scaled", "scaled by torch", "scaled hook"),
    ],
)
def test_ranks_out_of_data_step_with_the_averages_of_the_others(results: Results, how: str) -> None:
    """Join([ddp, zero]) ends with the weights of Adam over all ranks' batches."""
    for rank in agreed(results, f"uneven {how}"):
        assert max(rank["off"], rank["local"]) <= ROUNDING


def test_an_optimizer_left_out_of_join_raises_on_all_ranks(results: Results) -> None:
    found = [rank["local"] for rank in agreed(results, "left out")]
    assert "use Join([ddp, optimizer])" in found[0]
    assert all("rank 0 rejected the step" in other for other in found[1:])


def test_sharded_gradients_do_not_go_with_join(results: Results) -> None:
    assert "use DDP, with reduce_scatter_hook" in agreed(results, "sharded join")[0]["raised"]

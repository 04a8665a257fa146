"""Unusual calls around a sharded optimizer's steps give right results or clear errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, case, each_rank

pytestmark = pytest.mark.timeout(150)

ROUNDING = 1e-5  # from averages of equal gradients, and from other orders of summing


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("zero_misuse_worker.py")


@pytest.mark.parametrize(
    "name",
    [
        "failed_backward",
        "reentrant_and_tied",
        "two_optimizers",
        "other_layout",
        "closure_replaces_memory",
        "clipped_copies",
        "complex_gradients_are_clipped",
    ],
)
def test_ends_where_the_plain_optimizer_ends(results: Results, name: str) -> None:
    assert case(results, name)["off"] <= ROUNDING


def test_the_trainers_container_loads_its_shards(results: Results) -> None:
    for found in each_rank(results, "trainers_container_loads_its_shards"):
        assert found["off"] == 0.0
        for partition in ("greedy", "balanced"):
            assert found[partition].startswith("ValueError"), found[partition]
            assert ".lr' is None, expected a value like" in found[partition]


def test_another_shape_is_refused(results: Results) -> None:
    assert "is now of shape (131, 8, 3, 3)" in case(results, "other_layout")["raised"]


def test_gradients_of_the_last_step_are_not_added_to(results: Results) -> None:
    assert "call the optimizer's zero_grad()" in case(results, "without_zero_grad")["raised"]


def test_a_copy_with_a_scheduler_steps_itself(results: Results) -> None:
    found = case(results, "copied_with_scheduler")
    assert found["original_moved"] == 0.0
    assert found["copy_moved"]
    assert found["off"] == 0.0


def test_reading_foreign_state_changes_nothing(results: Results) -> None:
    assert case(results, "foreign_state")["entries"] == 8


def test_a_refused_optimizer_leaves_no_hooks(results: Results) -> None:
    found = case(results, "second_optimizer")
    assert "learning rate" in found["refused"]
    assert found["kept"]
    assert "another optimizer has taken the gradient" in found["twice"]


def test_a_load_refused_on_one_rank_changes_none(results: Results) -> None:
    found = case(results, "load_refused_on_one_rank")
    for rank in results:
        assert "exp_avg" in rank["load_refused_on_one_rank"]["local"]["raised"]
    assert (found["lr"], found["entries"]) == (0.1, 0)


def test_a_group_that_the_local_optimizer_refuses(results: Results) -> None:
    found = case(results, "group_refused")
    assert "remainder" in found["raised"]
    assert found["groups"] == [1, 1]


def test_two_buckets_of_parameters_are_under_way_at_most(results: Results) -> None:
    found = case(results, "gathers_two_buckets")
    assert found["buckets"] > found["most"] == 2


@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_masters_from_fp32_weights(results: Results, partition: str) -> None:
    found = case(results, "masters_from_fp32")
    assert "is missing" in found[f"{partition} raised"]
    assert found[f"{partition} kept"]
    assert found[partition] == 0.0
    assert found[f"{partition} threshold"] == 0.25


def test_codes_of_other_layouts(results: Results) -> None:
    found = case(results, "codes_of_other_layouts")["local"]
    assert "a AdamW, expected FusedAdam" in found.pop("of another class")
    assert len(found) == 4
    assert all(found.values()), found


@pytest.mark.parametrize("name", ["partial", "function"])
def test_however_the_local_optimizer_is_made(results: Results, name: str) -> None:
    for rank in each_rank(results, "by_another_callable"):
        assert rank[f"{name} False"] == [0.0, True, False]
        assert rank[f"{name} True"][0::2] == [0.0, True]
        assert "give state_dtype to ZeroRedundancyOptimizer" in rank["codes"]


def test_a_join_that_failed_is_over(results: Results) -> None:
    for rank in each_rank(results, "after_a_join_that_failed"):
        assert rank["failed"]
        assert rank["norm"] == pytest.approx(rank["expected"])


def test_arguments_that_differ_between_ranks_are_named(results: Results) -> None:
    for rank in each_rank(results, "unequal_arguments"):
        raised = rank.copy()
        assert "differ in their arguments" in raised.pop("to")
        assert len(raised) == 11
        for name, message in raised.items():
            assert "the ranks differ in their parameters and arguments" in message
            assert f"{name}=" in message

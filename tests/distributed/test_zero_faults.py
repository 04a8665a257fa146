"""ZeroRedundancyOptimizer on two and four gloo ranks: faults of torch's class, and parity.

Every comparison is bitwise with an unsharded optimizer that had the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .rank_results import Results, each_rank

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]

KINDS = ("AdamW", "FusedAdamW", "SGD")
PARTITIONS = ("greedy", "bucket view", "balanced")
SOON = 5  # seconds; a group's timeout is 10, and an error takes well below 1


@pytest.fixture(scope="module")
def two(run_ranks: Callable[[str, int], Results]) -> Results:
    return run_ranks("zero_faults_worker.py", 2)


@pytest.fixture(scope="module")
def four(run_ranks: Callable[[str, int], Results]) -> Results:
    return run_ranks("zero_faults_worker.py", 4)


def check_equal(found: list[dict[str, Any]], *fields: str) -> None:
    """Asserts that no rank saw a difference."""
    for field in fields:
        assert [f[field] for f in found] == [""] * len(found), field


def check_raised(outcomes: list[dict[str, Any]], kind: str, *parts: str) -> None:
    """Asserts that every rank raised the error soon, with all parts in its message."""
    for outcome in outcomes:
        assert outcome["raised"] == kind, outcome
        assert outcome["seconds"] < SOON, outcome
        for part in parts:
            assert part in outcome["message"]


# ---- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_loading_and_stepping_leave_the_state_dict_alone(
    two: Results, kind: str, partition: str
) -> None:
    check_equal(each_rank(two, f"load_leaves_the_dict {kind}, {partition}"), "loaded", "stepped")


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_state_for_bfloat16_parameters(two: Results, kind: str, partition: str) -> None:
    """The state is cast to bfloat16, and training continues like the unsharded optimizer's."""
    found = each_rank(two, f"narrower_parameters {kind}, {partition}")
    assert all(f["dtypes"] == ["torch.bfloat16"] for f in found)
    check_equal(found, "params")


def test_closures_are_called_as_often_as_each_rank_needs(two: Results) -> None:
    found = each_rank(two, "closures")
    assert sorted(f["local"] for f in found) == [2, 10]
    check_equal(found, "params")


def test_ranks_go_on_from_the_same_step(two: Results) -> None:
    assert each_rank(two, "counted steps") == [{"steps": 10.0}] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_held_once(two: Results, kind: str) -> None:
    """After a load a rank holds only its half. A consolidated copy lasts until the next step."""
    found = each_rank(two, f"held once {kind}")
    for rank, f in enumerate(found):
        spare = 4096  # control blocks
        assert f["own"] == pytest.approx(f["total"] / 2)
        assert f["empty"] <= spare
        assert f["own"] <= f["loaded"] <= f["own"] + spare
        copy = f["total"] if rank == 0 else 0
        assert f["own"] + copy <= f["consolidated"] <= f["own"] + copy + spare
        assert f["own"] <= f["stepped"] <= f["own"] + spare


@pytest.mark.parametrize("how", ["shape 0", "shape 1", "shape 3", "shape 5", "balanced"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shape_is_refused_on_all_ranks(two: Results, kind: str, how: str) -> None:
    """All ranks raise, whichever rank owns the parameter, and nothing changes."""
    found = each_rank(two, f"refused {kind}, {how}")
    number = how.partition(" ")[2] or "3"
    check_raised(found, "ValueError", f"parameter {number}", "(2, ")
    check_equal(found, "changed")


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdamW"])
def test_incomplete_state_is_refused_on_all_ranks(two: Results, kind: str, number: int) -> None:
    found = each_rank(two, f"refused {kind}, missing {number}")
    check_raised(found, "ValueError", "step")
    check_equal(found, "changed")


@pytest.mark.parametrize("how", ["sizes", "fewer", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_groups_are_refused_on_all_ranks(two: Results, kind: str, how: str) -> None:
    found = each_rank(two, f"refused {kind}, {how}")
    check_raised(found, "ValueError", "group")
    check_equal(found, "changed")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_another_dtype_is_refused(two: Results, partition: str) -> None:
    """Nothing changes, and training continues without the group."""
    found = each_rank(two, f"other dtype {partition}, False")
    check_raised(found, "ValueError", "bfloat16", "float32")
    check_equal(found, "changed")
    for f in found:
        assert f["params"] == ""


@pytest.mark.parametrize("partition", PARTITIONS)
def test_another_dtype_where_it_is_allowed(two: Results, partition: str) -> None:
    """The group is added and trains with its dtype, which difference() compares as well."""
    found = each_rank(two, f"other dtype {partition}, True")
    assert all(f["raised"] == "" and f["changed"] != "" for f in found)
    check_equal(found, "params")


# ---- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_the_unsharded_optimizers(
    two: Results, kind: str, partition: str, named: bool
) -> None:
    """Keys, order, dtypes and bits are equal, and plain and sharded optimizers load the dict.

    torch's class loads an unnamed dict. A sharded optimizer without names loads a named dict.
    """
    found = each_rank(two, f"state dict {kind}, {partition}{', named' * named}")
    check_equal(found, "difference", "into plain", "from plain")
    check_equal(found, *(["without names"] if named else ["into torch's", "from torch's"]))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_fresh_consolidation_gives_a_whole_state_dict(
    two: Results, kind: str, partition: str
) -> None:
    found = each_rank(two, f"state dict {kind}, {partition}")
    for when in ("before", "stale", "loaded since"):
        check_raised([f[when] for f in found], "RuntimeError", "consolidate_state_dict")
    first, *others = (f["target"] for f in found)
    assert first["raised"] == ""
    check_raised(others, "RuntimeError", "consolidate_state_dict")
    check_raised([f["no such rank"] for f in found], "ValueError", "to=2")


@pytest.mark.parametrize("to", range(4))
def test_consolidation_sends_state_to_the_target_alone(four: Results, to: int) -> None:
    """State is sent once, and only to the target. All ranks get the headers."""
    for rank, f in enumerate(each_rank(four, f"traffic to {to}")):
        assert f["target"] == (rank == to)
        given = f["bytes"].pop("send", 0)
        taken = sum(f["bytes"].values())
        assert f["own"] > 500_000
        if rank == to:
            assert given == 0
            assert 3 * f["own"] <= taken <= 3.03 * f["own"]
        else:
            assert f["own"] <= given <= 1.01 * f["own"]
            assert taken < 0.02 * f["own"]


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_state_of_many_kinds(request: pytest.FixtureRequest, ranks: str) -> None:
    """State may have tuples, keys of all kinds, nested tensors, inf and nan."""
    check_equal(each_rank(request.getfixturevalue(ranks), "peculiar"), "difference", "loaded")


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_an_object_in_one_ranks_state_raises_on_all(
    request: pytest.FixtureRequest, ranks: str
) -> None:
    results = request.getfixturevalue(ranks)
    found = each_rank(results, "object")
    check_raised(found, "RuntimeError", "'extra'", f"rank {len(results) - 1}")
    check_raised([f["state_dict"] for f in found], "TypeError", "expected strings as keys")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_resuming_at_other_world_sizes(four: Results, partition: str) -> None:
    """Four ranks, then two, then four again resume from files that weights_only=True loads."""
    check_equal(each_rank(four, f"other world size {partition}"), "params", "state")


# ---- who owns what -------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["greedy", "bucket view"])
def test_frozen_parameters(four: Results, partition: str) -> None:
    """Trainable elements are spread. torch's rule would give ranks 0, 300, 300 and 200."""
    found = each_rank(four, f"frozen {partition}")
    for f in found:
        assert sorted(f["loads"]) == [100, 100, 300, 300]
        assert f["owners since"] == f["owners"] == found[0]["owners"]
        assert set(f["owners"]) <= set(range(4))
        # Two steps of 800 trainable elements. In each step the ranks agree twice on whether to
        # take it, by 16 bytes. A bucket adds less than 64 bytes per parameter.
        exact = 2 * (800 * 4 + 2 * 16)
        assert exact <= f["sent"] <= exact + (2 * 4 * 64 if partition == "bucket view" else 0)
    check_equal(found, "params")


def test_torchs_partition(four: Results) -> None:
    for f in each_rank(four, "plan"):
        for plan in f["plans"]:
            assert plan["ours"] == plan["theirs"]


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_chosen_owners(request: pytest.FixtureRequest, ranks: str) -> None:
    results = request.getfixturevalue(ranks)
    found = each_rank(results, "params_per_rank")
    size = len(results)
    owners = [i // 2 % size for i in range(6)]
    for rank, f in enumerate(found):
        assert f["owners"] == owners
        assert f["held"] == [i for i, owner in enumerate(owners) if owner == rank]
    check_equal(found, "params", "state")
    check_raised([f["too short"] for f in found], "ValueError", "world size")
    check_raised([f["stranger"] for f in found], "ValueError", "not passed")
    check_raised([f["twice"] for f in found], "ValueError", "twice")
    check_raised([f["balanced"] for f in found], "ValueError", "params_per_rank")
    for f in found:
        assert f["groups"]["raised"] in ("ValueError", "RuntimeError")
        assert "single parameter group" in f["groups"]["message"]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_buckets_keep_strides_and_alignment(two: Results, dtype: str) -> None:
    """Each parameter begins at a multiple of 64 bytes in one of two buckets."""
    found = [f[dtype] for f in each_rank(two, "buckets")]
    for f in found:
        assert f["strides"] and f["channels last"]
        assert f["storages"] == 2
        assert f["misaligned"] == 0
    check_equal(found, "params")


def test_named_parameters_where_a_rank_has_none_of_a_group(four: Results) -> None:
    check_equal(each_rank(four, "named"), "params", "state")


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("order", "'two'"),
        ("names", "'two'"),
        ("shape", "'two'"),
        ("dtype", "'one'"),
        ("count", "'three'"),
        ("frozen", "'two'"),
        ("shape, unnamed", "(2, 2)"),
    ],
)
def test_other_parameters_on_one_rank(two: Results, how: str, name: str) -> None:
    found = each_rank(two, f"other {how}")
    check_raised(found, "ValueError", name, "rank 0", "rank 1")


@pytest.mark.parametrize("how", ["mixed dtypes", "none"])
def test_what_one_rank_refuses_ends_all(two: Results, how: str) -> None:
    """All ranks raise if one rank has a list that is invalid on every rank."""
    check_raised(each_rank(two, f"other {how}"), "ValueError")


@pytest.mark.parametrize("how", ["shape", "count", "dtype", "known"])
def test_another_group_on_one_rank(two: Results, how: str) -> None:
    """All ranks raise, and nothing changes on any rank."""
    found = each_rank(two, f"added other {how}")
    check_raised(found, "ValueError")
    check_equal(found, "changed")


# ---- steps ---------------------------------------------------------------------------------------


def check_overlap(found: list[dict[str, Any]]) -> None:
    for f in found:
        assert f["buckets"] > 1
        assert f["moved"]
        assert f["early"]["step"]["raised"] == ""
        for call in ("state_dict", "consolidate", "load"):
            check_raised([f["early"][call]], "RuntimeError", "fully initialized")
        assert f["indices"]
        assert f["params"] == ""
        assert f["moments"] == 0
    assert sum(f["held"] for f in found) == 6
    assert all(f["held"] < 6 for f in found)


@pytest.mark.parametrize("how", ["", ", shards", ", interleaved", ", interleaved, shards"])
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdamW"])
def test_overlap_in_a_subgroup(four: Results, kind: str, how: str) -> None:
    found = each_rank(four, f"subgroup {kind}{how}")
    assert found[:2] == [{"outside": True}] * 2
    check_overlap(found[2:])


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("how", ["", ", interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_overlap(two: Results, kind: str, how: str, schedule: bool) -> None:
    """The weights equal bitwise DDP with the plain optimizer, also under a schedule."""
    check_overlap(each_rank(two, f"overlap {kind}{how}{', schedule' * schedule}"))


def test_hooks_want_an_optimizer_that_overlaps(two: Results) -> None:
    check_raised(each_rank(two, "hook over plain zero"), "ValueError", "overlap_with_ddp=True")


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("how", ["", ", unscaled before"])
def test_an_overflow_on_one_rank_skips_on_all(two: Results, partition: str, how: str) -> None:
    """If a rank overflows in the third of five steps, all ranks skip that step."""
    found = each_rank(two, f"our scaler {partition}{how}")
    for f in found:
        assert f["moved"] == [True, True, False, True, True]
        assert f["scales"] == [1024.0] * 2 + [512.0] * 3
        assert f["read on the host"] == 0
        assert f["left"] == []
    check_equal(found, "params")


@pytest.mark.parametrize(
    "name",
    [
        *(f"our scaler, all well, {partition}" for partition in PARTITIONS),
        "stock scaler, FusedAdamW, none",
        "stock scaler, fused AdamW, none",
    ],
)
def test_scalers_leave_the_check_to_the_step(two: Results, name: str) -> None:
    found = each_rank(two, name)
    for f in found:
        assert f["moved"] == [True] * 5
        assert f["scales"] == [1.0] * 5
        assert f["read on the host"] == 0
        assert f["left"] == []
    check_equal(found, "params")


@pytest.mark.parametrize("kind", ["FusedAdamW", "fused AdamW"])
def test_torchs_scaler_skips_what_overflows_on_all(two: Results, kind: str) -> None:
    """torch's scaler skips a step that overflows on all ranks, as DDP's averages do."""
    found = each_rank(two, f"stock scaler, {kind}, all")
    for f in found:
        assert f["moved"] == [True, True, False, True, True]
        assert f["scales"] == [1024.0] * 2 + [512.0] * 3
        assert f["read on the host"] == 0
    check_equal(found, "params")


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [False, True])
def test_copies(two: Results, kind: str, partition: str, alone: bool) -> None:
    """Original and copy both train, and neither disturbs the other."""
    found = each_rank(two, f"copied {kind}, {partition}{', alone' * alone}")
    assert [f["shared"] for f in found] == [0, 0]
    check_equal(found, "untouched", "state untouched", "original", "copy", "copy's state")


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_other_memory_are_taken_over(two: Results, kind: str, partition: str) -> None:
    check_equal(each_rank(two, f"replaced weights {kind}, {partition}"), "params")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_random_rounding_does_not_depend_on_the_partition(two: Results, partition: str) -> None:
    found = each_rank(two, f"random rounding {partition}")
    assert all(f["differs from nearest"] for f in found)
    check_equal(found, "params")

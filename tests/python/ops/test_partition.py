"""Partitions of whole tensors and of buckets match torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.zero_redundancy_optimizer import _OverlapInfo, _OverlapStatus

from torchopt_ext import ops


def with_methods(light: Any, *names: str) -> Any:
    """Binds torch's own methods to an object that has only what they need."""
    for name in names:
        method = ZeroRedundancyOptimizer.__dict__[name]
        setattr(light, name, method.__get__(light, ZeroRedundancyOptimizer))
    return light


def torch_ranks(groups: list[list[int]], world_size: int) -> list[list[int]]:
    """Returns the ranks that torch's own method assigns."""
    params = [[torch.empty(n, device="meta") for n in group] for group in groups]
    light = with_methods(
        SimpleNamespace(
            _partition_parameters_cache=[],
            world_size=world_size,
            param_groups=[{"params": group} for group in params],
        ),
        "_get_min_index",
        "_partition_param_group",
    )
    parts = ZeroRedundancyOptimizer._partition_parameters(light)
    owner = {
        id(param): rank
        for rank, rank_groups in enumerate(parts)
        for group in rank_groups
        for param in group["params"]
    }
    return [[owner[id(param)] for param in group] for group in params]


def our_ranks(groups: list[list[int]], world_size: int) -> list[list[int]]:
    loads = [0] * world_size
    result = []
    for numels in groups:
        ranks = list(ops.partition_greedy(numels, world_size, loads))
        for n, rank in zip(numels, ranks, strict=True):
            loads[rank] += n
        result.append(ranks)
    return result


numels = st.one_of(st.integers(0, 8), st.sampled_from([64, 768, 768 * 768, 50257 * 768]))


@given(st.lists(st.lists(numels, max_size=30), min_size=1, max_size=4), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_same_ranks_as_torch(groups: list[list[int]], world_size: int) -> None:
    assert our_ranks(groups, world_size) == torch_ranks(groups, world_size)
    if len(groups) == 1:
        assert list(ops.partition_greedy(groups[0], world_size)) == our_ranks(groups, world_size)[0]


@given(st.lists(numels, max_size=30), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_ties_go_to_the_least_tie_load(
    sizes: list[int], world_size: int, data: st.DataObject
) -> None:
    loads, ties = data.draw(
        st.tuples(*[st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size)] * 2)
    )
    ranks = list(ops.partition_greedy(sizes, world_size, loads, ties))
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        assert ranks[i] == min(range(world_size), key=lambda r: (loads[r], ties[r], r))
        loads[ranks[i]] += sizes[i]


def test_tie_loads_do_not_change() -> None:
    assert list(ops.partition_greedy([0, 0, 0], 3, tie_loads=[2, 1, 1])) == [1, 1, 1]
    assert list(ops.partition_greedy([4, 4, 4], 3, tie_loads=[2, 1, 1])) == [1, 2, 0]


def torch_assignments(
    buckets: list[list[int]], world_size: int, shard_buckets: bool
) -> list[tuple[int, int, int, int]] | None:
    """Returns torch's (bucket, offset, length, rank) assignments in order, or None if it fails."""
    params = [[torch.empty(n, device="meta") for n in bucket] for bucket in buckets]
    light = with_methods(
        SimpleNamespace(
            world_size=world_size,
            global_rank=0,
            _overlap_with_ddp=True,
            _overlap_info=_OverlapInfo(world_size),
            _bucket_assignments_per_rank_cache=[],
        ),
        "_get_min_index",
        "_get_assigned_rank",
        "_assign_bucket_subset_to_rank",
    )
    info = light._overlap_info
    info.status = _OverlapStatus.INITIALIZED
    info.shard_buckets = shard_buckets
    info.params_per_bucket = params
    info.params_per_rank = [[] for _ in range(world_size)]
    info.total_size = sum(sum(bucket) for bucket in buckets)
    recorded = []
    assign = light._assign_bucket_subset_to_rank

    def record(bucket: int, subset: list[torch.Tensor], offset: int, rank: int, seen: Any) -> None:
        recorded.append((bucket, offset, len(subset), rank))
        assign(bucket, subset, offset, rank, seen)

    light._assign_bucket_subset_to_rank = record
    assignments: Any = ZeroRedundancyOptimizer.__dict__["_bucket_assignments_per_rank"]
    try:
        assignments.fget(light)
    except AssertionError as error:
        if "All indices are disallowed" in str(error):
            return None
        raise
    return recorded


@given(
    st.lists(st.lists(numels, min_size=1, max_size=8), max_size=8),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_same_assignments_as_torch(
    buckets: list[list[int]], world_size: int, shard_buckets: bool
) -> None:
    arguments = ([n for bucket in buckets for n in bucket], [len(bucket) for bucket in buckets])
    expected = torch_assignments(buckets, world_size, shard_buckets)
    rows = ops.partition_buckets(*arguments, world_size, shard_buckets)
    if expected is None:  # torch runs out of ranks
        runs = [[row for row in rows if row[0] == b] for b in range(len(buckets))]
        assert all(
            len({rank for *_, rank in bucket}) == len(bucket) <= world_size for bucket in runs
        )
        assert [
            [i for _, first, n, _ in bucket for i in range(first, first + n)] for bucket in runs
        ] == [[*range(len(bucket))] for bucket in buckets]
    else:
        assert rows == expected


def test_an_equal_share_ends_a_run_of_parameters() -> None:
    assert ops.partition_buckets([1, 1, 1, 1], [4], 4, True) == [(0, i, 1, i) for i in range(4)]
    rows = ops.partition_buckets([3, 1, 2], [1, 2], 2, True)
    assert rows == [(0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 0)]


def test_the_last_rank_takes_the_rest_of_a_bucket() -> None:
    rows = ops.partition_buckets([0, 0, 3, 0, 3], [1, 4], 2, True)
    assert rows == [(0, 0, 1, 0), (1, 0, 1, 0), (1, 1, 3, 1)]


def test_large_numbers_of_elements() -> None:
    assert list(ops.partition_greedy([2**40, 2**61, 2**40 + 1], 2)) == [1, 0, 1]
    assert list(ops.partition_greedy([2, 1], 2, [2**63 - 4, 2**63 - 4])) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 0), "world_size"),
        (([1, 2], -1), "world_size"),
        (([1, -2], 2), "numels"),
        (([1, 2], 2, [0]), "initial_loads"),
        (([1, 2], 2, [0, 0, 0]), "initial_loads"),
        (([1, 2], 2, None, [0]), "tie_loads"),
        (([1, 2], 2, [0, -1]), r"initial_loads\[1\] is -1"),
        (([1, 2], 2, None, [-1, 0]), r"tie_loads\[0\] is -1"),
        (([2**62, 2**62], 1), r"numels\[1\].*2\*\*63"),
        (([1, 2], 2, [0, 2**63 - 3]), r"numels\[1\].*2\*\*63"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.partition_greedy(*arguments)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [2], 0), "world_size is 0"),
        (([1, -2], [2], 2), r"numels\[1\] is -2"),
        (([1, 2], [2, 0], 2), r"bucket_lengths\[1\] is 0"),
        (([1, 2], [1, 2], 2), "bucket_lengths add up to 3 for 2 numels"),
        (([1, 2], [1], 2), "bucket_lengths add up to 1 for 2 numels"),
    ],
)
def test_bad_buckets(arguments: tuple[Any, ...], message: str, shard_buckets: bool) -> None:
    with pytest.raises(ValueError, match=message):
        ops.partition_buckets(*arguments, shard_buckets)

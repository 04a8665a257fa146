"""The balanced partition meets its contract, checked against all allowed places for cuts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext import ops
from torchopt_ext.optim.balanced_plan import plan_buckets

BLOCK = 4096
SHORT_ROW = 64
MEBI = 2**20
Tensors = list[tuple[int, int]]
"""(elements, row length) of each tensor."""


def places_inside(numel: int, row_length: int, alignment: int) -> set[int]:
    """Returns where the contract allows cuts, counted from the tensor's start."""
    if row_length < SHORT_ROW:
        return set(range(0, numel, alignment))
    in_row = [k for k in range(0, row_length, BLOCK) if k == 0 or row_length - k >= SHORT_ROW]
    return {row + k for row in range(0, numel, row_length) for k in in_row}


def check(
    tensors: Tensors,
    plan: ops.BalancedPlan,
    world_size: int,
    target: int,
    alignment: int,
) -> None:
    buckets, starts, lengths, cuts = plan
    assert len(buckets) == len(starts) == len(tensors)
    assert len(cuts) == len(lengths)
    assert buckets == sorted(buckets)
    assert sorted(set(buckets)) == list(range(len(lengths)))
    assert all(start % alignment == 0 for start in starts)

    for b, length in enumerate(lengths):
        inside = [i for i in range(len(tensors)) if buckets[i] == b]
        ends = [starts[i] + tensors[i][0] for i in inside]
        assert starts[inside[0]] == 0
        assert all(
            0 <= starts[i] - end < alignment for i, end in zip(inside[1:], ends, strict=False)
        )
        assert length == ends[-1]
        edges = cuts[b]
        assert len(edges) == world_size + 1
        assert edges[0] == 0
        assert edges[-1] == length
        assert edges == sorted(edges)

        places = {length} | {starts[i] for i in inside}
        for i in inside:
            places |= {starts[i] + k for k in places_inside(*tensors[i], alignment)}
        assert set(edges) <= places
        # Each cut is a nearest place, and so shares meet the bound of the contract.
        for rank, cut in enumerate(edges):
            ideal = length * rank // world_size
            assert abs(cut - ideal) == min(abs(place - ideal) for place in places)
        owned = [b - a for a, b in pairwise(edges)]
        largest = max(alignment, BLOCK + SHORT_ROW - 1 + alignment - 1)
        assert max(owned) - min(owned) <= 2 * largest

    for i in range(1, len(tensors)):
        if buckets[i] != buckets[i - 1]:  # closed only for lack of room
            end = starts[i - 1] + tensors[i - 1][0]
            padded = -(-end // alignment) * alignment
            assert padded + tensors[i][0] > target
    for b, length in enumerate(lengths):
        sizes = [n for (n, _), bucket in zip(tensors, buckets, strict=True) if bucket == b and n]
        if length > target and len(sizes) > 1:  # the last bucket took in a bucket of less than half
            assert b == len(lengths) - 1
            assert length < max(target, *sizes) + target / 2 + alignment
    assert len(lengths) < 2 or 2 * lengths[-1] >= target


@st.composite
def tensor_lists(draw: st.DrawFn) -> Tensors:
    row_length = st.one_of(
        st.just(1),
        st.integers(1, 200),
        st.sampled_from([63, 64, 65, 4095, 4096, 4097, 4159, 4160, 8191, 8255, 8256, 14336, 30000]),
    )
    rows = st.one_of(st.integers(0, 12), st.integers(0, 300))
    shapes = draw(st.lists(st.tuples(rows, row_length), max_size=14))
    return [(min(rows, 400_000 // length) * length, length) for rows, length in shapes]


alignments = st.one_of(st.just(64), st.sampled_from([1, 2, 3, 100, 4096, 5000]))


@given(tensor_lists(), st.one_of(st.integers(1, 40), st.just(700)), alignments)
@settings(max_examples=300, deadline=None)
def test_one_bucket(tensors: Tensors, world_size: int, alignment: int) -> None:
    numels, rows = [n for n, _ in tensors], [length for _, length in tensors]
    plan = ops.partition_balanced(numels, rows, world_size, alignment=alignment)
    check(tensors, plan, world_size, max(8 * MEBI, world_size * MEBI), alignment)


@given(
    st.lists(
        st.sampled_from(
            [(0, 1), (7, 1), (MEBI, 1024), (700_000, 100), (300 * 5000, 5000), (4 * MEBI, 2 * MEBI)]
        ),
        max_size=12,
    ),
    st.integers(1, 3),
    st.one_of(st.integers(1, 5 * MEBI), st.just(2**62)),
    st.sampled_from([64, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_several_buckets(
    tensors: Tensors, world_size: int, bucket_elements: int, alignment: int
) -> None:
    numels, rows = [n for n, _ in tensors], [length for _, length in tensors]
    plan = ops.partition_balanced(numels, rows, world_size, bucket_elements, alignment)
    check(tensors, plan, world_size, bucket_elements, alignment)


stacks = st.tuples(st.integers(1, 4), st.integers(0, 70), st.sampled_from([1, 27, 64, 100, 256]))
matrices = st.tuples(st.integers(0, 70), st.sampled_from([1, 27, 63, 64, 100, 4096, 4160, 9000]))


@given(
    st.lists(st.one_of(stacks, matrices), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from([None, 1, 20_000]),
)
@settings(max_examples=200, deadline=None)
def test_rows_that_stay_whole(
    shapes: list[tuple[int, ...]], world_size: int, bucket_elements: int | None
) -> None:
    """A cut is where the row of a matrix begins, and where the sum of squares allows it."""
    params = [torch.empty(shape, device="meta") for shape in shapes]
    rows = [math.prod(shape[1:]) if math.prod(shape) else 1 for shape in shapes]
    widths = [shape[-1] for shape in shapes]
    free = plan_buckets(params, world_size, bucket_elements)
    buckets, starts, lengths, cuts = plan_buckets(params, world_size, bucket_elements, widths)
    assert (buckets, starts, lengths) == free[:3]
    for b, (edges, length) in enumerate(zip(cuts, lengths, strict=True)):
        places = {0, length}
        for i in [i for i in range(len(params)) if buckets[i] == b]:
            inside = places_inside(params[i].numel(), rows[i], 64)
            places |= {starts[i], *(starts[i] + k for k in inside if k % widths[i] == 0)}
        assert edges == sorted(edges) and len(edges) == world_size + 1
        assert set(edges) <= places
        # From a cut that is allowed without this rule to the nearest on either side.
        for edge, before in zip(edges, free.cuts[b], strict=True):
            assert abs(edge - before) == min(abs(place - before) for place in places)


def test_no_tensors() -> None:
    assert ops.partition_balanced([], [], 3) == ([], [], [], [])


def test_no_elements() -> None:
    plan = ops.partition_balanced([0, 0], [1, 70], 3)
    assert plan == ([0, 0], [0, 0], [0], [[0, 0, 0, 0]])


def test_a_small_plan() -> None:
    # Rows of 4,100 are not cut at 4,096, which would leave 4 elements. The next tensor of 10
    # elements starts at the next multiple of 64.
    plan = ops.partition_balanced([8200, 10, 10], [4100, 1, 1], 2)
    assert plan == ([0, 0, 0], [0, 8256, 8320], [8330], [[0, 4100, 8330]])
    plan = ops.partition_balanced([10, 10, 10], [1, 1, 1], 3)
    assert plan.cuts == [[0, 64, 64, 138]]  # 92 is nearer to 64 than to 128


def llama3_8b() -> Tensors:
    hidden, kv, mlp, vocab = 4096, 1024, 14336, 128256
    layer = [
        (hidden * hidden, hidden),
        (kv * hidden, hidden),
        (kv * hidden, hidden),
        (hidden * hidden, hidden),
        (mlp * hidden, hidden),
        (hidden * mlp, mlp),
        (mlp * hidden, hidden),
        (hidden, 1),
        (hidden, 1),
    ]
    embedding = (vocab * hidden, hidden)
    return [embedding, *layer * 32, (hidden, 1), embedding]


@pytest.mark.parametrize("world_size", [8, 64, 1024])
def test_largest_share_of_llama3_8b(world_size: int) -> None:
    """The slowest rank's sum over the buckets is within 0.5% of an equal share."""
    tensors = llama3_8b()
    numels = [n for n, _ in tensors]
    assert sum(numels) == 8_030_261_248
    plan = ops.partition_balanced(numels, [length for _, length in tensors], world_size)
    largest = sum(max(b - a for a, b in pairwise(edges)) for edges in plan.cuts)
    loads = [0] * world_size
    for n, rank in zip(numels, ops.partition_greedy(numels, world_size), strict=True):
        loads[rank] += n
    equal = sum(numels) / world_size
    assert largest / equal < 1.005
    assert max(loads) / equal > largest / equal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -2], [1, 1], 2), r"numels\[1\] is -2"),
        (([1, 2**53], [1, 1], 2), r"numels\[1\]"),
        (([1, 2], [1], 2), "1 row_lengths for 2 numels"),
        (([1, 2], [1, 1, 1], 2), "3 row_lengths for 2 numels"),
        (([0, 2], [0, 1], 2), r"row_lengths\[0\] is 0"),
        (([1, 2], [1, -1], 2), r"row_lengths\[1\] is -1"),
        (([1, 8], [1, 3], 2), r"row_lengths\[1\] is 3.*numels\[1\]"),
        (([1], [1], 0), "world_size is 0"),
        (([1], [1], -1), "world_size is -1"),
        (([1], [1], 2**40), "world_size"),
        (([1], [1], 2, 0), "bucket_elements is 0"),
        (([1], [1], 2, 1, 0), "alignment is 0"),
        (([1], [1], 2, 1, 2**40), "alignment"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.partition_balanced(*arguments)

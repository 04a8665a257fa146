"""boxes() splits an interval of a tensor's memory into boxes."""

from __future__ import annotations

import functools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext.zero.part import Part, in_memory_order
from torchopt_ext.zero.state_shard import StateShard, boxes


@st.composite
def intervals(draw: st.DrawFn, longest: int = 5) -> tuple[int, int, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, longest), max_size=4)))
    begin = draw(st.integers(0, math.prod(shape)))
    return begin, draw(st.integers(begin, math.prod(shape))), shape


def elements(box: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> list[int]:
    """Returns the box's elements by their place in memory."""
    whole = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.reshape(-1).tolist()


@functools.cache
def runs(shape: tuple[int, ...]) -> set[tuple[int, int]]:
    """Returns all intervals of memory that form one box."""
    result = set()
    for begin in range(math.prod(shape)):
        for end in range(begin + 1, math.prod(shape) + 1):
            inside = torch.zeros(math.prod(shape), dtype=torch.bool)
            inside[begin:end] = True
            places = inside.view(shape).nonzero()
            extent = places.amax(0) - places.amin(0) + 1 if shape else torch.ones(1)
            if extent.prod() == end - begin:
                result.add((begin, end))
    return result


def fewest(begin: int, end: int, shape: tuple[int, ...]) -> int:
    best = {begin: 0}
    for stop in range(begin + 1, end + 1):
        best[stop] = 1 + min(best[a] for a in range(begin, stop) if (a, stop) in runs(shape))
    return best[end]


@given(intervals())
def test_each_element_once_and_in_the_order_of_memory(case: tuple[int, int, tuple[int, ...]]):
    begin, end, shape = case
    result = [element for box in boxes(begin, end, shape) for element in elements(box, shape)]
    assert result == list(range(begin, end))


@settings(deadline=None)  # the first example of a shape finds all its boxes
@given(intervals(longest=3))
def test_no_box_is_empty_and_none_could_be_saved(case: tuple[int, int, tuple[int, ...]]):
    begin, end, shape = case
    result = list(boxes(begin, end, shape))
    assert all(math.prod(sizes) for _, sizes in result)
    assert len(result) == fewest(begin, end, shape)


@given(intervals(), st.randoms(use_true_random=False))
def test_a_shard_puts_memory_where_it_is_in_the_parameter(
    case: tuple[int, int, tuple[int, ...]], random: object
) -> None:
    begin, end, memory_shape = case
    if begin == end:
        return
    order = list(range(len(memory_shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    param = torch.arange(math.prod(memory_shape)).view(memory_shape).permute(order)
    flat = in_memory_order(param, param)
    # Two neighboring parts of one parameter, as a rank may hold.
    middle = (begin + end) // 2
    parts = [
        Part(param, a, b, flat[a:b], param) for a, b in ((begin, middle), (middle, end)) if a < b
    ]
    shard = StateShard.of([(part, part.tensor) for part in parts])
    assert shard.shape == param.shape
    result = torch.full_like(param, -1)
    for chunk, values in zip(shard.chunks, shard.shards, strict=True):
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        assert (result[place] == -1).all()
        result[place] = values
    where = in_memory_order(result, param)
    assert torch.equal(where[begin:end], flat[begin:end])
    assert (where[:begin] == -1).all() and (where[end:] == -1).all()

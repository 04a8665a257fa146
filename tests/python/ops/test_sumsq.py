"""The sum of squares is exact or within its bound, with the same bits for any split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from exact_reference import (
    DTYPES,
    format_of,
    from_bits,
    name_of,
    random_elements,
    sumsq_reference,
    to_bits,
)
from formulas import Accumulator, add_squares, row_length
from hypothesis import given, settings
from hypothesis import strategies as st
from softfloat import INF, NAN, decode
from torch import Tensor

from torchopt_ext import ops

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
Layout = tuple[list[int], list[int]]
NAN_SLOT, INFINITY_SLOT = 69, 68


def accumulated(grads: Sequence[Tensor]) -> Tensor:
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_(list(grads), accumulator)
    return accumulator


def limbs(*grads: Tensor) -> list[int]:
    return accumulated(grads).tolist()


def total(*grads: Tensor) -> float:
    return ops.accumulator_total(accumulated(grads)).item()


def expected_limbs(flat: Tensor, row: int) -> list[int]:
    acc = Accumulator()
    sumsq_reference(acc, flat, row)
    return acc.limbs()


def exact_sum_of_squares(elements: Tensor) -> Fraction:
    acc = Accumulator()
    fmt = format_of(elements.dtype)
    for bits in to_bits(elements):
        _, magnitude = decode(fmt, bits)
        square = magnitude * magnitude * (1 << 2200)
        assert square.denominator == 1
        acc.units += square.numerator
    return Fraction(acc.units, 1 << 2200)


def strides_of(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides = [0] * len(shape)
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride *= shape[d]
    return strides


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draws dense shapes of up to some hundred elements, with dimensions in any storage order."""
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 63, 64, 65]), max_size=4))
    while math.prod(shape) > 700:
        shape[shape.index(max(shape))] //= 8
        shape = [max(size, 1) for size in shape]
    return shape, strides_of(shape, draw(st.permutations(range(len(shape)))))


@by_dtype
@given(data=st.data(), layout=layouts())
@settings(max_examples=60, deadline=None)
def test_any_layout_and_any_bits(dtype: torch.dtype, data: st.DataObject, layout: Layout) -> None:
    shape, strides = layout
    seed = data.draw(st.integers(0, 2**32))
    low, high = data.draw(st.sampled_from([(-20, 0), (-149, 127), (-149, -120), (120, 127)]))
    specials = data.draw(st.booleans())
    flat = random_elements(dtype, math.prod(shape), seed, low, high, specials=specials)
    acc, row = Accumulator(), row_length(shape, strides) if flat.numel() else 1
    add_squares(acc, format_of(dtype), to_bits(flat), row)
    assert limbs(flat.as_strided(shape, strides)) == acc.limbs() == expected_limbs(flat, row)


@by_dtype
@pytest.mark.parametrize("shape", [(50_000,), (1000, 63), (300, 100), (2, 8, 4097)])
def test_large_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    flat = random_elements(dtype, math.prod(shape), 1, -60, 10)
    row = math.prod(shape[1:])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert limbs(flat.view(shape)) == expected_limbs(flat, row)


@by_dtype
def test_rows_of_permuted_tensors(dtype: torch.dtype) -> None:
    flat = random_elements(dtype, 4 * 6 * 20 * 10, 2)
    channels_last = flat.as_strided((4, 6, 20, 10), strides_of((4, 6, 20, 10), (0, 2, 3, 1)))
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    for size in (4, 3, 2, 1):  # also sharded by rows
        assert limbs(*channels_last.split(size)) == expected_limbs(flat, 6 * 20 * 10)
    # A single image is one row, like each image of a batch. So is a matrix with one row.
    image = flat.as_strided((1, 24, 20, 10), strides_of((1, 24, 20, 10), (0, 2, 3, 1)))
    for tensor, row in (
        (image, 4800),
        (flat.view(48, 100).t(), 100),
        (flat.view(100, 48).t(), 1),
        (flat.as_strided((1, 4800), (77, 1)), 4800),
        (flat.as_strided((4800, 1), (1, 4800)), 1),
    ):
        assert limbs(tensor) == expected_limbs(flat, row)
    matrix = flat.view(60, 80)
    for gapped in (matrix[:, :70], matrix[::3], matrix[:, ::2].t(), matrix[0, 0].expand(9, 80)):
        assert limbs(gapped) == limbs(gapped.contiguous())


@by_dtype
def test_order_splits_offsets_and_threads(dtype: torch.dtype) -> None:
    flat = random_elements(dtype, 96_000, 4, -40, 20)
    flat[1234] = 0
    matrix = flat.view(12, 8000)
    whole, rows = limbs(matrix), list(matrix.split(1))
    # Cut at block boundaries, as ZeRO cuts shards.
    blocks = [row[:, a:b] for row in rows for a, b in ((0, 4096), (4096, 8000))]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for parts in (rows, rows[::-1], rows[::2] + rows[1::2], [matrix[:5], matrix[5:]], blocks):
            assert limbs(*parts) == whole
    # Several calls add up to one.
    accumulator = ops.new_accumulator()
    for row in rows:
        ops.grad_sumsq_([row], accumulator)
    assert accumulator.tolist() == whole
    # 1-D tensors may be cut anywhere.
    assert limbs(flat) == limbs(*flat.split(777)) == limbs(flat[:1], flat[1:])
    # The alignment does not matter.
    for offset in range(1, 9):
        moved = torch.empty(96_000 + offset, dtype=dtype)[offset:].copy_(flat)
        assert moved.storage_offset() == offset
        assert limbs(moved.view(12, 8000)) == whole
        assert limbs(moved) == limbs(flat)


@by_dtype
def test_every_length_of_a_row_and_its_tail(dtype: torch.dtype) -> None:
    flat = random_elements(dtype, 4096 + 200, 5, -30, 10)
    for n in [*range(1, 200), *range(4090, 4100), *range(4159, 4164), 4096 + 200]:
        assert limbs(flat[:n]) == expected_limbs(flat[:n], 1)
        assert limbs(flat[:n].view(1, n)) == expected_limbs(flat[:n], n)


def test_many_tensors_of_any_dtype_at_once() -> None:
    expected, tensors = Accumulator(), []
    for dtype in DTYPES:
        flat = random_elements(dtype, 30_000, 6)
        for i in range(80):
            row, start = 1 + i * 7 % 150, i * 331
            sumsq_reference(expected, flat[start : start + 3 * row], row)
            tensors.append(flat[start : start + 3 * row].view(3, row))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert limbs(*tensors[::2], *tensors[1::2]) == expected.limbs()


@by_dtype
def test_empty_and_zero_dimensional_tensors(dtype: torch.dtype) -> None:
    assert limbs() == [0] * 70
    empty = [torch.empty(shape, dtype=dtype) for shape in ((0,), (3, 0), (0, 100), (2, 0, 64))]
    assert limbs(*empty) == [0] * 70
    scalar = torch.tensor(-1.5, dtype=dtype)
    assert total(*empty, scalar) == 2.25
    zeros = [torch.zeros(1000, dtype=dtype), -torch.zeros(5, 100, dtype=dtype)]
    assert limbs(*zeros) == [0] * 70
    assert math.copysign(1.0, total(*zeros)) == 1.0


SPECIALS = [math.nan, -math.nan, math.inf, -math.inf]


@by_dtype
@pytest.mark.parametrize("row", [1, 150, 4096 + 70], ids=["1-D", "row 150", "row 4166"])
def test_nonfinite_elements_are_found_everywhere(dtype: torch.dtype, row: int) -> None:
    n = max(row, 150)
    places = range(n) if n < 1000 else [*range(0, n, 37), *range(63, 70), *range(4090, n)]
    shape = (n,) if row == 1 else (1, n)
    flat = random_elements(dtype, n, 8)
    finite = limbs(flat.view(shape))
    for i in places:
        for special in SPECIALS:
            damaged = flat.clone()
            damaged[i] = special
            got = limbs(damaged.view(shape))
            slots = (0, 1) if math.isnan(special) else (1, 0)
            assert (got[INFINITY_SLOT], got[NAN_SLOT]) == slots, (i, special)
            if row == 1:
                without = torch.cat([flat[:i], flat[i + 1 :]])
                assert got[:68] == limbs(without)[:68]
            else:  # the other blocks still count
                blocks = list(flat.split(4096))
                del blocks[i // 4096]
                assert got[:68] == limbs(*(b.view(1, -1) for b in blocks))[:68]
    assert limbs(flat.view(shape)) == finite


def test_float64_overflow_of_a_square_counts_as_infinite() -> None:
    x = torch.full((10,), 1.0, dtype=torch.float64)
    x[4] = 1.5e154
    assert limbs(x)[INFINITY_SLOT] == 1
    assert total(x) == math.inf
    block = torch.full((1, 640), 1.3e154, dtype=torch.float64)  # every square is finite
    assert limbs(block) == [1 if k == INFINITY_SLOT else 0 for k in range(70)]
    assert total(block.view(-1)[:1]) == 1.3e154 * 1.3e154


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_largest_finite_elements_do_not_overflow(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for shape in ((10_000,), (2, 5000)):
        expected = Fraction(largest) ** 2 * 10_000
        got = total(torch.full(shape, largest, dtype=dtype))
        assert abs(Fraction(got) - expected) <= expected * 70 / 2**53


def bounded(elements: Tensor, shape: tuple[int, ...]) -> None:
    exact = exact_sum_of_squares(elements)
    got = Fraction(total(elements.view(shape)))
    slack = 1 if elements.dtype == torch.float64 else 0  # each square is rounded first
    assert abs(got - exact) <= exact * (70 + slack) / 2**53


@by_dtype
@pytest.mark.parametrize("order", ["rising", "falling", "spikes", "alternating", "equal"])
def test_stated_bound_for_adversarial_orders(dtype: torch.dtype, order: str) -> None:
    n = 2 * 4160
    high = 7 if dtype == torch.float16 else 60
    x = random_elements(dtype, n, 9, -high, high)
    if order in ("rising", "falling"):
        x = x.abs().sort(descending=order == "falling").values
    elif order == "spikes":  # a large square in every lane, then many that just round
        x = torch.full((n,), 1 + 2**-7, dtype=dtype) * 2.0**-high
        x.view(2, 4160)[:, :64] = 2.0**high
    elif order == "alternating":
        x[::2] = 2.0**-high
    else:
        x = torch.full((n,), 1.0 + 2**-7, dtype=dtype)
    bounded(x, (2, 4160))
    bounded(x, (n // 64, 64))


@by_dtype
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 3), row=st.integers(64, 300))
@settings(max_examples=25, deadline=None)
def test_stated_bound_for_any_magnitudes(
    dtype: torch.dtype, seed: int, rows: int, row: int
) -> None:
    low, high = {torch.float64: (-500, 480), torch.float16: (-24, 14)}.get(dtype, (-149, 120))
    bounded(random_elements(dtype, rows * row, seed, low, high), (rows, row))


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=name_of)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_short_rows_are_exact(dtype: torch.dtype, data: st.DataObject) -> None:
    fmt = format_of(dtype)
    finite = st.integers(0, 2**fmt.width - 1).filter(
        lambda bits: decode(fmt, bits)[1] not in (INF, NAN)
    )
    bits = data.draw(st.lists(finite, min_size=1, max_size=40)) * data.draw(st.integers(1, 30))
    x = from_bits(dtype, bits)
    exact = exact_sum_of_squares(x)
    acc = Accumulator(int(exact * (1 << 1088)))
    assert acc.units == exact * (1 << 1088)
    assert limbs(x) == acc.limbs()


def test_gradients_are_only_read() -> None:
    for dtype in DTYPES:
        x = random_elements(dtype, 5000, 11, specials=True)
        before, version = to_bits(x), x._version
        limbs(x, x.view(5, 1000))
        assert to_bits(x) == before
        assert x._version == version

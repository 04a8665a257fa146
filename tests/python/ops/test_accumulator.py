"""The exact accumulator matches integer arithmetic, for any doubles in any order."""

from __future__ import annotations

import random

import torch
from exact_reference import from_bits, to_bits
from formulas import Accumulator
from hypothesis import example, given, settings
from hypothesis import strategies as st
from softfloat import FP64, INF, NAN, decode, encode, special_bits

from torchopt_ext import _C, ops

ANY_DOUBLE = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from(special_bits(FP64)),
    st.floats(width=64).map(lambda x: to_bits(torch.tensor(x, dtype=torch.float64))[0]),
)
FINITE_DOUBLE = ANY_DOUBLE.filter(lambda bits: decode(FP64, bits)[1] not in (INF, NAN))


def exact_sum(doubles: list[int]) -> Accumulator:
    acc = Accumulator()
    for bits in doubles:
        acc.add(decode(FP64, bits))
    return acc


def added(doubles: list[int]) -> torch.Tensor:
    accumulator = ops.new_accumulator()
    _C.accumulator_add(accumulator, from_bits(torch.float64, doubles))
    return accumulator


def normalized(accumulator: torch.Tensor) -> list[int]:
    accumulator = accumulator.clone()
    _C.accumulator_add(accumulator, torch.empty(0))  # propagates carries
    return accumulator.tolist()


def total_bits(accumulator: torch.Tensor) -> int:
    total = ops.accumulator_total(accumulator)
    assert total.shape == ()
    assert total.dtype == torch.float64
    return to_bits(total)[0]


def test_new_accumulator_is_an_empty_sum() -> None:
    accumulator = ops.new_accumulator()
    assert accumulator.dtype == torch.int64
    assert accumulator.tolist() == [0] * 70
    assert total_bits(accumulator) == 0


@given(st.lists(ANY_DOUBLE, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_doubles_in_any_order(doubles: list[int], rng: random.Random) -> None:
    expected = exact_sum(doubles)
    accumulator = added(doubles)
    before = accumulator.tolist()
    assert total_bits(accumulator) == encode(FP64, expected.total())
    assert accumulator.tolist() == before  # reading the total changes nothing
    assert normalized(accumulator) == expected.limbs()
    rng.shuffle(doubles)
    assert normalized(added(doubles)) == expected.limbs()


@given(st.lists(st.lists(ANY_DOUBLE, max_size=10), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_merging_ranks_is_an_integer_sum(ranks: list[list[int]]) -> None:
    parts = [torch.tensor(normalized(added(doubles))) for doubles in ranks]
    merged = torch.stack(parts).sum(0)  # as an all-reduce does
    expected = exact_sum([bits for doubles in ranks for bits in doubles])
    assert total_bits(merged) == encode(FP64, expected.total())
    assert normalized(merged) == expected.limbs()


def limb_lists() -> st.SearchStrategy[list[int]]:
    limb = st.one_of(
        st.just(0), st.integers(-(2**62), 2**62), st.integers(-3, 3), st.just(2**32 - 1)
    )
    sparse = st.dictionaries(st.integers(0, 67), limb, max_size=6).map(
        lambda d: [d.get(k, 0) for k in range(68)]
    )
    return st.one_of(sparse, st.lists(limb, min_size=68, max_size=68))


@given(limb_lists())
@example([0] * 66 + [-1, 1])
@example([-1 << 14] + [0] * 67)
@example([0xFFFFFFFF] * 66 + [0xFFFFFFFF, 0])
@settings(max_examples=200, deadline=None)
def test_total_of_limbs_that_are_not_normalized(limbs: list[int]) -> None:
    limbs[0] &= -1 << 14  # sums of doubles are multiples of 2**-1074
    acc = Accumulator(sum(limb << 32 * k for k, limb in enumerate(limbs)))
    accumulator = torch.tensor([*limbs, 0, 0])
    assert total_bits(accumulator) == encode(FP64, acc.total())
    assert normalized(accumulator) == acc.limbs()


def test_a_total_below_the_smallest_double_is_zero() -> None:
    """No sum of doubles has such limbs."""
    accumulator = ops.new_accumulator()
    accumulator[0] = 1
    assert ops.accumulator_total(accumulator) == 0.0

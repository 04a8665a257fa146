"""The fast tests try every value of every parameter (tests/support/tiers.py)."""

from __future__ import annotations

import itertools

import pytest

from ..support.tiers import covering


@pytest.mark.parametrize("sizes", [(), (1,), (5,), (3, 7), (2, 1, 4)])
def test_covers_every_value_in_as_few_cases_as_can_be(sizes: tuple[int, ...]) -> None:
    counts = itertools.product(*(range(size) for size in sizes))
    cases = [frozenset((f"p{k}", value) for k, value in enumerate(values)) for values in counts]
    chosen = covering(cases)
    assert frozenset().union(*cases) == frozenset().union(*(cases[i] for i in chosen))
    assert len(chosen) == len(set(chosen)) == max(sizes, default=1)


def test_keeps_what_has_no_other_combination() -> None:
    cases = [frozenset({("kind", k), ("way", 0)}) for k in range(4)] + [frozenset({("kind", 9)})]
    assert sorted(covering(cases)) == [0, 1, 2, 3, 4]

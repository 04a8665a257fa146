"""The greedy partition against torch's ZeroRedundancyOptimizer itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchopt_ext import ops


def torch_ranks(groups: list[list[int]], world_size: int) -> list[list[int]]:
    """Ranks by torch's own method, on an object that has just what the method needs."""
    params = [[torch.empty(n, device="meta") for n in group] for group in groups]
    light: Any = SimpleNamespace(
        _partition_parameters_cache=[],
        world_size=world_size,
        param_groups=[{"params": group} for group in params],
    )
    for name in ("_get_min_index", "_partition_param_group"):
        method = ZeroRedundancyOptimizer.__dict__[name]
        setattr(light, name, method.__get__(light, ZeroRedundancyOptimizer))
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


def test_large_numbers_of_elements() -> None:
    assert list(ops.partition_greedy([2**40, 2**61, 2**40 + 1], 2)) == [1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 0), "world_size"),
        (([1, 2], -1), "world_size"),
        (([1, -2], 2), "numels"),
        (([1, 2], 2, [0]), "initial_loads"),
        (([1, 2], 2, [0, 0, 0]), "initial_loads"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.partition_greedy(*arguments)

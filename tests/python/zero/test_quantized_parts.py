"""Parts of parameters with 8-bit moments cover the groups of the whole parameter, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.state.quantized import (
    can_quantize,
    quantize,
    scale_shape,
)
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.ranks import Ranks

CODES_OF = {m.name: m.codes for m in ADAM.moments}
SCALES = {m.scale: m.name for m in ADAM.moments}

SHAPES = [(3, 9000), (1, 9010), (70, 100), (5,), (9, 9), (2, 3, 5000), (0, 64), (333,), (40, 64)]


class Group:
    """Stands in for a process group; nothing is sent."""


def params() -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES]
    return [*tensors, torch.randn(200, 8, 3, 3).to(memory_format=torch.channels_last)]


def parts_of(ranks: int) -> Iterator[Part]:
    """Yields the parts of all ranks, for the same parameters on every rank."""
    for rank in range(ranks):
        buckets = BalancedBuckets(
            Ranks(Group(), rank, ranks), Parameters([]), 20_000, sharded_gradients=False
        )
        buckets.add_group(params())
        yield from (buckets.part_of(tensor) for tensor in buckets.mine[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_parts_have_the_groups_of_the_whole_each_once(ranks: int) -> None:
    cut_in_rows = set()
    covered: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for part in parts_of(ranks):
        whole, moment = part.param, part.tensor
        assert can_quantize(moment) == can_quantize(whole)
        if not can_quantize(whole):
            continue
        row = whole[:1].numel()
        cut_in_rows |= {tuple(whole.shape)} if row and part.begin % row else set()
        for name, scale in zip(CODES_OF, SCALES, strict=True):
            values = whole.square() if name == "exp_avg_sq" else whole
            codes, scales = quantize(name, values)
            its_codes, its_scales = quantize(name, part.cut(values))
            assert part.of(codes).equal(its_codes)
            assert part.of_entry(scale).of(scales).equal(its_scales)
            assert part.of_entry(name) is part
        piece = part.of_entry(next(iter(SCALES)))
        assert piece.end - piece.begin == piece.tensor.numel()
        covered.setdefault(tuple(whole.shape), []).append((piece.begin, piece.end))
    assert bool(cut_in_rows) == (ranks > 1)
    for shape, runs in covered.items():
        runs.sort()
        total = scale_shape(torch.empty(shape)).numel()
        assert [0, *(end for _, end in runs)] == [*(begin for begin, _ in runs), total]

"""Plans balanced buckets for parameters, as zero/balanced.py lays them and estimate.py counts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_ext import ops

SHORT_ROW = 64
"""Rows of fewer numbers than this are summed element by element (csrc/kernels/block_rule.h)."""
BLOCK = 4096
"""Numbers of longer rows that are summed together."""
ALIGNMENT = 64
"""Tensors with short rows are cut at multiples of this number."""


def reals_of(param: Tensor) -> int:
    """Returns how many numbers the sum of squares counts for an element."""
    return 2 if param.is_complex() else 1


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Returns a dense tensor's dimensions, outermost in memory first; ascending if not dense."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d], d)))


def row_length(param: Tensor) -> int:
    """Returns the elements per index of the outermost dimension in memory; 1 for 1-D and 0-D."""
    if param.dim() < 2 or not param.numel():
        return 1
    return param.numel() // param.shape[memory_order(param)[0]]


def plan_buckets(
    params: Sequence[Tensor],
    world_size: int,
    bucket_elements: int | None,
    columns: Sequence[int] = (),
) -> ops.BalancedPlan:
    """Returns :func:`torchopt_ext.ops.partition_balanced` of parameters of one dtype.

    Rows and blocks of the sum of squares are counted in numbers, the plan in elements.

    Args:
        columns: of each parameter's matrices, if their rows must stay whole (NorMuon).
    """
    reals, rows = reals_of(params[0]), [*map(row_length, params)]
    plan = ops.partition_balanced(
        [reals * param.numel() for param in params],
        [reals * row for row in rows],
        world_size,
        bucket_elements and reals * bucket_elements,
        ALIGNMENT,
    )
    starts, lengths = ([n // reals for n in counts] for counts in (plan.starts, plan.lengths))
    cuts = [[cut // reals for cut in of_bucket] for of_bucket in plan.cuts]
    for n, width in enumerate(columns):
        bucket, start, size = plan.buckets[n], starts[n], params[n].numel()
        is_last = plan.buckets[n + 1 : n + 2] != [bucket]
        end = lengths[bucket] if is_last else starts[n + 1]
        for k, cut in enumerate(cuts[bucket]):
            if start < cut < start + size:
                at = _row_start(cut - start, size, rows[n], width)
                cuts[bucket][k] = start + at if at < size else end
    return ops.BalancedPlan(plan.buckets, starts, lengths, cuts)


def _row_start(at: int, size: int, row: int, width: int) -> int:
    """Returns where a matrix's row of this width begins, nearest to ``at``, and a cut may be."""
    begin, length, unit, least = 0, size, ALIGNMENT, 1
    if row >= SHORT_ROW:  # a shorter rest would be a short row
        begin, length, unit, least = at // row * row, row, BLOCK, SHORT_ROW
    unit, inside = math.lcm(unit, width), at - begin
    last = (length - least) // unit * unit
    before = min(inside // unit * unit, last)
    after = before + unit if before < last else length
    return begin + (before if inside - before <= after - inside else after)

"""Plans balanced buckets for parameters, as zero/balanced.py lays them and estimate.py counts."""

from collections.abc import Sequence

from torch import Tensor

from torchopt_ext import ops


def reals_of(param: Tensor) -> int:
    """Returns how many numbers the sum of squares counts for an element."""
    return 2 if param.is_complex() else 1


def plan_buckets(
    params: Sequence[Tensor], rows: Sequence[int], world_size: int, bucket_elements: int | None
) -> ops.BalancedPlan:
    """Returns :func:`torchopt_ext.ops.partition_balanced` of parameters of one dtype.

    Rows and blocks of the sum of squares are counted in numbers, the plan in elements.
    """
    reals = reals_of(params[0])
    plan = ops.partition_balanced(
        [reals * param.numel() for param in params],
        [reals * row for row in rows],
        world_size,
        bucket_elements and reals * bucket_elements,
    )
    starts, lengths = ([n // reals for n in counts] for counts in (plan.starts, plan.lengths))
    cuts = [[cut // reals for cut in of_bucket] for of_bucket in plan.cuts]
    return ops.BalancedPlan(plan.buckets, starts, lengths, cuts)

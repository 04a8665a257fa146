"""The sharded step inside DDP's backward: which part of which gradient bucket a rank owns.

The classes are torch's, because torch's own hooks
(torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook) read and fill them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torchopt_ext import _C, ops
from torchopt_ext._torch import overlap_classes
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import bucket_of

OverlapInfo, BucketAssignment, OverlapStatus = overlap_classes()


def assign_buckets(info: Any, ranks: Ranks) -> list[dict[int, Any]]:
    """Assigns every DDP bucket to a rank, or parts of it to ranks with ``info.shard_buckets``.

    Returns each rank's assignments by bucket.
    """
    buckets = info.params_per_bucket
    numels = [param.numel() for bucket in buckets for param in bucket]
    lengths = [len(bucket) for bucket in buckets]
    assigned: list[dict[int, Any]] = [{} for _ in range(ranks.size)]
    info.assigned_ranks_per_bucket = [set() for _ in buckets]
    for bucket, offset, count, rank in ops.partition_buckets(
        numels, lengths, ranks.size, info.shard_buckets
    ):
        part = buckets[bucket][offset : offset + count]
        assigned[rank][bucket] = BucketAssignment(bucket, part, offset)
        if rank == ranks.rank:
            info.offsets[bucket] = len(info.params_per_rank[rank])
        info.params_per_rank[rank] += part
        info.assigned_ranks_per_bucket[bucket].add(rank)
        info.num_bucket_assignments += 1
    return assigned


def of_whole_steps(name: str) -> Any:
    """Returns a property: the local FusedOptimizer's ``name``, for steps by all gradients at once.

    With ``overlap_with_ddp`` it raises AttributeError.
    """

    def fused(zero: Any) -> Any:
        if zero._steps_in_backward:
            raise AttributeError(
                f"overlap_with_ddp=True has no {name}: it steps in backward, bucket by bucket"
            )
        return zero.local.fused

    return property(
        lambda zero: getattr(fused(zero), name),
        lambda zero, value: setattr(fused(zero), name, value),
    )


@torch.no_grad()
def lay(assignments: Sequence[Any], params: Parameters) -> None:
    """Makes the parameters of each assignment views of the tensor that is sent, unless they are.

    Raises:
        RuntimeError: two of all parameters share memory.
    """
    moved = [a for a in assignments if getattr(a, "places", b"") != _C.places(a.parameters)]
    if moved:
        params.check_untied()
    for assignment in moved:
        assignment.tensor = bucket_of(assignment.parameters)
        assignment.places = _C.places(assignment.parameters)

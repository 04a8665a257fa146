"""The sharded step inside DDP's backward: which part of which gradient bucket a rank owns.

Names are those of torch.distributed.optim.zero_redundancy_optimizer, whose hooks
(torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook) read them.
"""

import enum
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext.optim.collective import wait
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import bucket_of


class OverlapStatus(enum.IntEnum):
    """How far the optimizer is: DDP decides on its buckets in the first backward passes."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


class BucketAssignment:
    """Parameters of one DDP bucket that one rank owns.

    Attributes:
        bucket_index: of the DDP gradient bucket.
        parameters: a run of the bucket's parameters.
        offset: position of the first of them within the bucket.
        device: where they are.
        tensor: 1-D; the parameters are views of it, so that they travel as one.
    """

    def __init__(self, bucket_index: int, parameters: list[Tensor], offset: int) -> None:
        if not parameters:
            raise ValueError("Empty bucket assignment")
        self.bucket_index = bucket_index
        self.parameters = parameters
        self.offset = offset
        self.device = parameters[0].device
        self.tensor: Tensor | None = None


class OverlapInfo:
    """What is known of DDP's buckets, and what one backward pass has done so far.

    Attributes:
        shard_buckets: a bucket may be divided among ranks, to even out their shares.
        params_per_bucket: the parameters of every DDP bucket.
        params_per_rank: every rank's parameters, by ascending bucket.
        offsets: for each bucket of this rank, where its parameters begin in params_per_rank.
        assigned_ranks_per_bucket: ranks of the group.
        num_bucket_assignments: over all ranks.
        total_size: elements of all buckets, with shard_buckets.
        broadcast_handles, bucket_indices_seen, bucket_index_to_future, bucket_index_to_bucket: of
            the backward pass under way.
    """

    def __init__(self, world_size: int) -> None:
        self.status: int = OverlapStatus.UNINITIALIZED
        self.shard_buckets = False
        self.params_per_bucket: list[list[Tensor]] = []
        self.params_per_rank: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.offsets: dict[int, int] = {}
        self.assigned_ranks_per_bucket: list[set[int]] = []
        self.num_bucket_assignments = 0
        self.total_size: int | None = None
        self.broadcast_handles: list[Any] = []
        self.bucket_indices_seen: list[int] = []
        self.bucket_index_to_future: dict[int, torch.futures.Future[Any]] = {}
        self.bucket_index_to_bucket: dict[int, Any] = {}

    def wait_for_broadcasts(self) -> None:
        """Waits until every rank's parameters have arrived."""
        assert len(self.broadcast_handles) == self.num_bucket_assignments, (
            f"{len(self.broadcast_handles)} of {self.num_bucket_assignments} broadcasts started"
        )
        for handle in self.broadcast_handles:
            wait(handle)
        self.broadcast_handles.clear()

    def clear_per_iter_info(self) -> None:
        """Forgets the backward pass that has ended."""
        self.bucket_indices_seen.clear()
        self.bucket_index_to_future.clear()
        self.bucket_index_to_bucket.clear()

    def assign(self, ranks: Ranks) -> list[dict[int, BucketAssignment]]:
        """Assigns every bucket or parts of it to ranks; returns each rank's part of each bucket."""
        buckets = self.params_per_bucket
        numels = [param.numel() for bucket in buckets for param in bucket]
        lengths = [len(bucket) for bucket in buckets]
        assigned: list[dict[int, BucketAssignment]] = [{} for _ in range(ranks.size)]
        self.assigned_ranks_per_bucket = [set() for _ in buckets]
        self.num_bucket_assignments = 0
        for bucket, offset, count, rank in ops.partition_buckets(
            numels, lengths, ranks.size, self.shard_buckets
        ):
            part = buckets[bucket][offset : offset + count]
            assigned[rank][bucket] = BucketAssignment(bucket, part, offset)
            if rank == ranks.rank:
                self.offsets[bucket] = len(self.params_per_rank[rank])
            self.params_per_rank[rank] += part
            self.assigned_ranks_per_bucket[bucket].add(rank)
            self.num_bucket_assignments += 1
        return assigned

    @staticmethod
    @torch.no_grad()
    def build_buckets(assigned: list[dict[int, BucketAssignment]]) -> None:
        """Lets the parameters of every assignment become views of one tensor."""
        for per_bucket in assigned:
            for assignment in per_bucket.values():
                for param in assignment.parameters:
                    assert param.requires_grad, "a parameter of a DDP bucket is frozen"
                assignment.tensor = bucket_of(assignment.parameters)

"""DDP communication hooks that step a ZeroRedundancyOptimizer inside the backward pass.

The interfaces are the same as in torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook. All
steps and broadcasts happen in the autograd thread, in the order of DDP's buckets. This order is the
same on every rank, but gloo's worker threads finish reductions in any order (pytorch#62300).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext import _C
from torchopt_ext._torch import call_at_end_of_backward, graph_task
from torchopt_ext.state.collective import collective, wait
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.optimizer import ZeroRedundancyOptimizer
from torchopt_ext.zero.overlap import lay
from torchopt_ext.zero.ranks import RETURNING

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    interleaved: bool = False,
) -> Hook:
    """Wraps ``hook`` so that the optimizer steps in backward, after the last bucket's gradients.

    The step overlaps with gradient reductions that are still under way. The first two backward
    passes (one with ``find_unused_parameters``, three with a static graph) do not step: DDP's
    final buckets are not known yet.

    Args:
        hook: a DDP communication hook that averages a bucket's gradients.
        zero: built with ``overlap_with_ddp=True`` from the model's parameters.
        shard_buckets: divide buckets among ranks for equal shares; else a bucket has one owner.
        interleaved: step bucket by bucket, as :func:`hook_with_zero_step_interleaved` does.

    Raises:
        ValueError: ``zero`` was built without ``overlap_with_ddp=True``, or has such a hook.
    """
    if not zero._overlap_with_ddp:
        raise ValueError("this hook needs a ZeroRedundancyOptimizer with overlap_with_ddp=True")
    if zero._steps_by_group_rank:
        raise ValueError("the optimizer steps by a hook already: build one for each DDP instance")
    # The pass in which DDP has its final buckets, counted over passes that call the hook. A rank
    # out of data (Join) makes them, too, but does not learn from DDP that buckets have changed.
    final = 3 if ddp.static_graph else 1 if ddp.find_unused_parameters else 2
    passes = 0
    info = zero._overlap_info
    info.shard_buckets = shard_buckets
    zero._steps_by_group_rank = True
    waiting: list[tuple[GradBucket, Future]] = []
    works: list[Any] = []

    def overlapping_hook(state: Any, bucket: GradBucket) -> Future:
        nonlocal passes
        future = hook(state, bucket)
        if bucket.index() == 0:
            passes += 1
            waiting.clear()  # an error may have ended the previous pass
            if passes == final + 1:
                zero._init_zero_for_overlap()
        if passes <= final:
            if passes == final:
                info.params_per_bucket.append(bucket.parameters())
            return future
        waiting.append((bucket, future))
        while waiting and (bucket.is_last() or (interleaved and len(waiting) > 1)):
            works.extend(_step_bucket(zero, *waiting.pop(0)))
        if bucket.is_last():
            with collective(RETURNING, zero.ranks.timeout):
                while works:
                    wait(works.pop(0))
        return future

    return overlapping_hook


hook_with_zero_step_interleaved = partial(hook_with_zero_step, interleaved=True)
"""As :func:`hook_with_zero_step`, but each bucket is stepped once the next has its gradients, so
that reductions and parameter broadcasts overlap with the rest of the backward pass.
"""


def _step_bucket(zero: ZeroRedundancyOptimizer, bucket: GradBucket, future: Future) -> list[Any]:
    """Waits for a bucket's gradients, updates this rank's part, and starts sending all parts."""
    zero.local.check_in_backward()  # on every rank, before any waits for a bucket's owner
    index, info = bucket.index(), zero._overlap_info
    with collective(f"reducing the gradients of bucket {index}"):
        result: Any = future.wait()
    assigned = zero._bucket_assignments_per_rank
    mine = assigned[zero.rank].get(index)
    lay([of_rank[index] for of_rank in assigned if index in of_rank], zero.params)
    if mine is not None:
        reduced = result[0] if isinstance(result, list) else result
        if reduced.data_ptr() != bucket.buffer().data_ptr():  # the hook has not reduced in place
            bucket.buffer().copy_(reduced)
        gradients: list[Tensor | None] = [None] * len(info.params_per_rank[zero.rank])
        first, count = info.offsets[index], len(mine.parameters)
        gradients[first : first + count] = bucket_gradients(bucket)[
            mine.offset : mine.offset + count
        ]
        zero._local_step(gradients)
    with collective(f"sending the parameters of bucket {index}"):
        return [
            zero.ranks.broadcast(of_rank[index].tensor, rank)
            for rank, of_rank in enumerate(assigned)
            if index in of_rank
        ]


def reduce_scatter_hook(
    zero: ZeroRedundancyOptimizer, ddp: DistributedDataParallel | None = None
) -> Hook:
    """Returns a DDP hook that reduces every gradient to the ranks that own its elements.

    It needs ``partition="balanced"`` and sends half as much as DDP's all-reduce. After backward
    ``p.grad`` is None: ``zero`` has the reduced gradients. If DDP is made anew, register it again.

    Ranks out of data need ``Join([ddp, zero])``; without ``zero`` all ranks raise.

    Args:
        zero: the optimizer. Gradients are averaged over its process group.
        ddp: the wrapped model, to compare its ranks; needed if ``zero`` does not have all ranks.

    Raises:
        ValueError: the partition is not "balanced", ``zero`` has ``sharded_gradients``, or ``zero``
            and ``ddp`` have different ranks.
    """
    if not isinstance(zero.partition, BalancedBuckets):
        raise ValueError("reduce_scatter_hook needs partition='balanced'")
    reducer = zero.partition.reducer
    if reducer.hooks:
        raise ValueError("sharded_gradients=True takes gradients by itself: use no hook, or no DDP")
    if ddp is not None or zero.world_size < dist.get_world_size():
        ranks = dist.get_process_group_ranks(zero.process_group)
        # A communication hook does not learn over which ranks DDP averages.
        of_ddp = None if ddp is None else dist.get_process_group_ranks(ddp.process_group)
        if ranks != of_ddp:
            raise ValueError(
                f"reduce_scatter_hook averages gradients over the optimizer's ranks {ranks}, DDP "
                f"averages over {of_ddp or 'unknown ranks'}: give both the same process group, and "
                f"the hook DDP, as reduce_scatter_hook(zero, ddp)"
            )
    if not reducer.active:
        reducer.passes.add(reducer)
        reducer.active = True
    taken: list[Tensor] = []

    def scattering_hook(state: Any, bucket: GradBucket) -> Future:
        joins = graph_task() < 0  # DDP's join hook calls, on a rank out of data
        if joins and reducer.stepped:
            reducer.zero_grad(set_to_none=True)
        if bucket.index() == 0:
            taken.clear()
        for param, gradient in zip(bucket.parameters(), bucket_gradients(bucket), strict=True):
            reducer.take(param, gradient)
            if param.grad is not None:  # DDP brings zeros for unused parameters
                reducer.present.add(param)
            taken.append(param)
        if bucket.is_last() and not joins:
            # DDP sets ``grad`` in a callback that it registers after this hook.
            clear = partial(_C.clear_gradients, taken)
            call_at_end_of_backward(partial(call_at_end_of_backward, clear))
        if bucket.is_last() and joins and not zero._in_join:
            reducer.wrong = (
                "this rank is out of data, and its sharded optimizer does not step along: use "
                "Join([ddp, optimizer])"
            )
            zero.step()  # raises on all ranks
        future: Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return scattering_hook


def bucket_gradients(bucket: GradBucket) -> list[Tensor]:
    """Returns a bucket's gradients with the strides of its parameters.

    DDP's bucket holds a dense gradient in the parameter's own order of dimensions, but
    ``bucket.gradients()`` assumes the contiguous order (torch/csrc/distributed/c10d/reducer.cpp and
    comm.hpp). So it would return channels_last gradients with their elements shuffled.
    """
    return [
        gradient.as_strided(param.shape, param.stride(), gradient.storage_offset())
        if torch.ops.aten.is_non_overlapping_and_dense(param)
        else gradient
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
